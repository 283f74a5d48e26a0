"""Conformance of every method with its declaration, generated from `METHODS`."""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterator

import pytest
import torch
from tests.helpers.experts import Experts, LazyDeltas, Overlaid, merged, usable_experts, variants
from tests.helpers.memory import peak_bytes
from tests.helpers.survey import call, run_survey
from tests.tolerances import F64_IDENTITY, relative_error
from torch import Tensor

from actmat.errors import RecipeError
from actmat.methods import MergeMethod, all_methods, get_method

WORKSPACE_SLACK = 1.2
"""Largest ratio of the measured peak to the declared one: LAPACK's own work space differs between builds."""

each_method = pytest.mark.parametrize("method", all_methods(), ids=lambda m: m.name)


def those(**declared: object) -> pytest.MarkDecorator:
    """The methods whose declaration has these values."""
    chosen = [m for m in all_methods() if all(getattr(m, k) == v for k, v in declared.items())]
    return pytest.mark.parametrize("method", chosen, ids=lambda m: m.name)


one_pass = pytest.mark.parametrize("method", [m for m in all_methods() if m.access.one_pass], ids=lambda m: m.name)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@each_method
def test_the_declaration_is_complete(method: MergeMethod) -> None:
    assert all((method.text.summary, method.text.equation, method.text.source))
    for option in method.options.values():
        assert option.doc, f"option '{option.name}' is not described under Args:"
        assert option.problem(option.default) is None
    assert set(method.needs_statistics) <= {"gram", "fisher"}
    if method.needs_statistics:
        assert "statistics" in method.needs
    if method.preset_of is not None:
        assert method.preset_of in {m.name for m in all_methods()}


@those(needs_base=True)
def test_the_base_is_looked_at_exactly_where_it_is_declared(method: MergeMethod) -> None:
    """Without it a call that uses it fails, and one that does not gives the same bytes."""
    if method.declared_by is None:
        given = inspect.signature(method.merge).parameters["base"]
        assert (given.default is None) == callable(method.access.base)
    experts = Experts.random(2, (4, 11))  # fewer rows than inputs, and an input that no data has: singular sums
    experts.deltas[1][0] = -2 * experts.deltas[0][0]  # and rows in conflict
    deltas = experts.deltas[: usable_experts(method, 2)]
    seen = torch.ones(11, dtype=torch.float64)
    seen[0] = 0
    grams = [g * seen * seen.unsqueeze(1) for g in experts.statistics["gram"][: len(deltas)]]
    given = {"statistics": experts.statistics | {"gram": grams}, "survey": None}
    for variant in variants(method):
        options = method.resolve_options(variant)
        if method.uses_base(options):
            moved = call(method, deltas, options, base=8 * experts.base.flip(0) + 1, **given).value
            assert not torch.equal(moved, call(method, deltas, options, base=experts.base, **given).value)
            with pytest.raises(RecipeError, match="needs the base"):
                call(method, deltas, options, base=None, **given)
        else:
            with_base = call(method, deltas, options, base=experts.base, **given).value
            assert torch.equal(call(method, deltas, options, base=None, **given).value, with_base)


@pytest.mark.parametrize("method", [m for m in all_methods() if m.access.baseless], ids=lambda m: m.name)
@pytest.mark.parametrize("n_experts", [1, 2, 3])
def test_without_a_base_any_point_gives_the_same_weights(method: MergeMethod, n_experts: int) -> None:
    """`W_0 + D*` is the same for two bases exactly where it is declared, with every switch off and on."""
    if usable_experts(method, n_experts) < n_experts:
        return
    experts = Experts.random(n_experts, (4, 11))
    weights = [d + experts.base for d in experts.deltas]
    shares = {"weights": [0.2, 0.5, 0.3][:n_experts]} if method.is_weighted else {}
    for variant in [{}, *({n: not o.default} for n, o in method.options.items() if o.type is bool)]:
        options = method.resolve_options(variant)
        results = [
            base + call(method, [w - base for w in weights], options, base=base, **shares).value
            for base in (experts.base, experts.base.flip(0) * 2 + 1)
        ]
        same = relative_error(*results) < F64_IDENTITY * 10
        assert same == method.is_baseless(variant, n_experts), (variant, relative_error(*results))


SIZES = [
    (1, (8, 11), None), (4, (8, 11), None), (7, (3, 4), None), (7, (4, 3), 1), (4, (12, 10), 2), (3, (1, 6), None),
    (3, (6, 1), None), (2, (1, 1), None),
]  # fmt: skip
"""Number of experts, shape, rank."""


@each_method
def test_the_result_is_finite_keeps_dtype_and_shape_and_owns_its_memory(method: MergeMethod) -> None:
    """And the inputs are left as they are."""
    for (n_experts, shape, rank), dtype in itertools.product(SIZES, (torch.float32, torch.float64)):
        experts = Experts.random(n_experts, shape, rank=rank, dtype=dtype)
        before = [x.clone() for x in experts.all_tensors()]
        out = merged(method, experts)
        assert (out.dtype, out.shape) == (dtype, shape)
        assert bool(out.isfinite().all()), (n_experts, shape, rank, dtype)
        taken = {x.untyped_storage().data_ptr() for x in experts.all_tensors()}
        assert out.untyped_storage().data_ptr() not in taken
        assert all(torch.equal(a, b) for a, b in zip(before, experts.all_tensors(), strict=True))


@pytest.mark.parametrize("method", [m for m in all_methods() if m.max_experts is not None], ids=lambda m: m.name)
def test_more_experts_than_the_rule_is_defined_for_are_refused(method: MergeMethod) -> None:
    experts = Experts.random(method.max_experts + 1, (4, 5))
    with pytest.raises(ValueError, match=method.name):
        call(method, experts.deltas, method.resolve_options({}), base=experts.base, statistics=experts.statistics)


@each_method
def test_a_zero_delta_among_others_gives_no_nan(method: MergeMethod) -> None:
    experts = Experts.random(4, (8, 11))
    for zero_at in range(usable_experts(method, 4)):
        deltas = [torch.zeros_like(d) if t == zero_at else d for t, d in enumerate(experts.deltas)]
        assert bool(merged(method, experts.with_deltas(deltas)).isfinite().all())


@each_method
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_float32_on_rounded_inputs_is_near_float64(method: MergeMethod, storage: torch.dtype) -> None:
    stored = Experts.random(4, (16, 12), seed=4).to(storage)
    assert relative_error(merged(method, stored.to(torch.float32)), merged(method, stored.to(torch.float64))) <= 1e-4


@each_method
def test_strides_do_not_matter(method: MergeMethod) -> None:
    experts = Experts.random(3, (8, 11))
    strided = experts.map(lambda x: x.mT.contiguous().mT)
    assert not strided.deltas[0].is_contiguous()
    assert relative_error(merged(method, strided), merged(method, experts)) <= 1e-12


@those(acts_on="matrix", is_random=False)
@pytest.mark.parametrize("rank", [None, 2], ids=["full", "rank_deficient"])
def test_batch_axes_are_a_loop(method: MergeMethod, rank: int | None) -> None:
    experts = Experts.random(3, (2, 3, 6, 8), rank=rank)
    experts.deltas[1][1, 2] = 0
    whole = merged(method, experts)
    for i in range(2):
        for j in range(3):
            part = merged(method, experts.map(lambda x, i=i, j=j: x[i, j].clone()))
            assert relative_error(whole[i, j], part) <= 1e-11


@pytest.mark.parametrize("name", ["iso_c", "iso_cts", "tsv"])
def test_weights_scale_the_deltas(name: str) -> None:
    deltas, weights = Experts.random(3, (12, 9)).deltas, [2.0, -0.5, 0.0]
    expected = get_method(name).merge([w * d for w, d in zip(weights, deltas, strict=True)]).value
    assert relative_error(get_method(name).merge(deltas, weights=weights).value, expected) <= 1e-11


@pytest.mark.parametrize("method", [m for m in all_methods() if m.acts_on != "matrix"], ids=lambda m: m.name)
@pytest.mark.parametrize("shape", [(), (13,), (2, 5, 4), (3, 2, 2, 3)])
def test_tensor_rules_take_any_shape(method: MergeMethod, shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(3)
    deltas = [torch.randn(shape, generator=rng) for _ in range(3)]
    fisher = [torch.rand(shape, generator=rng) for _ in range(3)]
    out = merged(method, Experts(deltas, torch.randn(shape, generator=rng), {"fisher": fisher}))
    assert out.shape == shape
    assert bool(out.isfinite().all())


@those(acts_on="elementwise", is_random=False)
def test_elementwise_rules_may_be_fed_pieces(method: MergeMethod) -> None:
    experts = Experts.random(usable_experts(method, 4), (7, 9), dtype=torch.float32)
    flat = Experts([d.flatten() for d in experts.deltas], experts.base.flatten(), {})
    options = method.resolve_options({})
    survey = run_survey(method, {"weight": experts.deltas}, options)
    pieces: list[Tensor] = []
    for start, stop in ((0, 1), (1, 32), (32, 63)):
        piece = flat.map(lambda x, a=start, b=stop: x[a:b])
        pieces.append(call(method, piece.deltas, options, base=piece.base, survey=survey).value)
    whole = call(method, experts.deltas, options, base=experts.base, survey=survey).value
    assert torch.equal(torch.cat(pieces), whole.flatten())


@one_pass
def test_one_pass_rules_read_each_delta_once_and_hold_one(method: MergeMethod) -> None:
    experts = Experts.random(usable_experts(method, 5), (8, 11))
    lazy = LazyDeltas(experts.deltas)
    options = method.resolve_options({})
    out = call(method, lazy, options, **experts.given(method, options))
    assert lazy.reads == [1] * len(experts.deltas)
    assert lazy.alive_before_read <= 1, "an earlier delta is still held while the next is read"
    assert torch.equal(out.value, merged(method, experts))


@one_pass
def test_one_pass_rules_keep_nothing_of_a_delta(method: MergeMethod) -> None:
    """An engine lays each delta over the one before it."""
    experts = Experts.random(usable_experts(method, 4), (8, 11))
    for variant in variants(method):
        options = method.resolve_options(variant)
        given = experts.given(method, options)
        expected = call(method, experts.deltas, options, **given).value
        assert torch.equal(call(method, Overlaid(experts.deltas), options, **given).value, expected), variant


@pytest.mark.parametrize("method", [m for m in all_methods() if m.combine is not None], ids=lambda m: m.name)
def test_a_rule_that_combines_is_the_sum_it_tells(method: MergeMethod) -> None:
    """An engine adds up by these coefficients and never calls the rule."""
    options = method.resolve_options({})
    assert method.streams(options)
    assert method.access.walks_again
    for count in {1, 2, usable_experts(method, 4)}:
        experts = Experts.random(count, (8, 11))
        basis = [experts.base, *experts.deltas] if method.uses_base(options) else list(experts.deltas)
        flat_BN = torch.stack([x.flatten() for x in basis])
        weights = {"weights": [1.0] * count} if method.is_weighted else {}
        found = method.combine(flat_BN @ flat_BN.mT, **weights, **options)
        result = call(method, experts.deltas, options, base=experts.base)
        total = torch.stack([c * x for c, x in zip(found.coefficients, basis, strict=True)]).sum(0)
        assert relative_error(total, result.value) < 1e-12
        assert found.stats.keys() == result.stats.keys()


@pytest.mark.parametrize("weights", [(0.5, 2.0), (-1.0, 3.0), (1.0, -1.0), (-1.0, 0.5), (0.0, 0.0)], ids=str)
@those(is_weighted=True)
def test_weights_that_a_rule_refuses_are_known_before_it_is_called(
    method: MergeMethod, weights: tuple[float, float]
) -> None:
    experts = Experts.random(2, (4, 5))
    for variant in variants(method):
        options = method.resolve_options(variant)
        problem_of = method.weights_problem
        known = problem_of(options, weights) if problem_of is not None else None
        with pytest.raises((ValueError, RecipeError)) if known else contextlib.nullcontext():
            call(method, experts.deltas, options, **experts.given(method, options), weights=weights)


@those(is_random=True)
def test_random_rules_follow_their_generator_alone(method: MergeMethod) -> None:
    experts = Experts.random(3, (12, 10))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = [merged(method, experts, seed=5, **v) for v in variants(method)]
    assert torch.equal(torch.get_rng_state(), state), "the global random state was touched"
    torch.manual_seed(2)
    again = [merged(method, experts, seed=5, **v) for v in variants(method)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = [merged(method, experts, seed=6, **v) for v in variants(method)]
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), "no variant draws anything"


@pytest.mark.parametrize("method", [m for m in all_methods() if m.survey is not None], ids=lambda m: m.name)
def test_surveys_do_not_depend_on_the_order_of_the_tensors(method: MergeMethod) -> None:
    model = {
        name: Experts.random(3, shape, seed=s) for s, (name, shape) in enumerate({"a": (6, 5), "b": (4, 9)}.items())
    }
    deltas = {name: experts.deltas for name, experts in model.items()}
    surveyed = 0
    for variant in variants(method):
        options = method.resolve_options(variant)
        forwards, backwards = (run_survey(method, deltas, options, backwards=b) for b in (False, True))
        if forwards is None:
            continue
        surveyed += 1
        for name in deltas:
            one, two = (call(method, deltas[name], options, survey=s).value for s in (forwards, backwards))
            assert torch.equal(one, two)
    assert surveyed > 0, "no variant wants the survey that is declared"


@each_method
def test_the_number_of_threads_does_not_change_the_bytes(method: MergeMethod, two_threads: None) -> None:
    experts = Experts.random(3, (24, 20), dtype=torch.float32)
    with_two = merged(method, experts)
    torch.set_num_threads(1)
    assert torch.equal(merged(method, experts), with_two)


@each_method
def test_workspace_is_positive_and_grows(method: MergeMethod) -> None:
    options = method.resolve_options({})
    sizes = [method.cost.workspace(shape, 3, options) for shape in ((8, 8), (16, 16), (4, 16, 16), (8, 16, 16))]
    assert all(isinstance(s, int) for s in sizes)
    assert sizes == sorted(sizes)
    # Not monotone in the number of experts: k = floor(min(O, I) / T) directions each can add up to fewer.
    assert all(method.cost.workspace((16, 16), n, options) >= 256 for n in range(1, usable_experts(method, 6) + 1))


@functools.cache
def single_precision(n_experts: int, shape: tuple[int, int], has_statistics: bool) -> Experts:
    """Made once for all methods: drawing them takes longer than merging them."""
    return Experts.random(n_experts, shape, dtype=torch.float32, statistics=has_statistics)


@each_method
def test_the_declared_workspace_bounds_the_measured_peak(method: MergeMethod) -> None:
    # Selections over a whole tensor may keep a scratch of fixed size, so those rules are shown large tensors.
    shapes = [(96, 64), (40, 160), (200, 40)] if method.acts_on == "matrix" else [(2000, 1000)]
    for shape, variant in [*((s, {}) for s in shapes), *((shapes[0], v) for v in variants(method))]:
        experts = single_precision(usable_experts(method, 4), shape, bool(method.needs_statistics))
        options = method.resolve_options(variant)
        given = experts.given(method, options)
        peak = peak_bytes(lambda: call(method, experts.deltas, options, **given)) / 4  # noqa: B023 - called at once
        declared = method.cost.workspace(shape, len(experts.deltas), options)
        assert peak <= WORKSPACE_SLACK * declared
        assert declared <= 8 * peak, "so pessimistic that a merge that fits would be refused"
        if variant:
            continue
        far = [1e-15 * d for d in experts.deltas]  # some rules copy what they bring to a size that squares survive
        assert peak_bytes(lambda: call(method, far, options, **given)) / 4 <= WORKSPACE_SLACK * declared  # noqa: B023
