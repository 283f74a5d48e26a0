"""Conformance of low-rank forms with the dense ones, and the declared laws of every method."""

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from tests.helpers.experts import Experts, merged, usable_experts, variants
from tests.helpers.spectra import orthogonal, random_lowrank
from tests.tolerances import F32_ELEMENTWISE, F32_PRODUCT, relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actmat.errors import RecipeError
from actmat.linalg.lowrank import LowRank
from actmat.methods import Merged, MergedLowRank, MergeMethod, all_methods, get_method

# Factored forms agree with the dense rule, and never form the dense matrix.


FACTORED = [m for m in all_methods() if m.lowrank is not None]
each_factored = pytest.mark.parametrize("method", FACTORED, ids=lambda m: m.name)


def needs_for(shape: Sequence[int], n_experts: int) -> dict[str, Any]:
    experts = Experts.random(n_experts, shape, seed=3)
    return {
        "generator": torch.Generator().manual_seed(0),
        "survey": None,
        "weights": None,
        "base": experts.base,
        "statistics": experts.statistics,
    }


def merge_lowrank(method: MergeMethod, deltas: list[LowRank], **options: Any) -> MergedLowRank:
    return ready_lowrank(method, deltas, **options)()


def arguments(method: MergeMethod, shape: Sequence[int], n_experts: int, options: dict[str, Any]) -> dict[str, Any]:
    """Needs and options of a call; `weights` may stand among the options."""
    given = needs_for(shape, n_experts) | {"weights": options.pop("weights", None)}
    return {n: v for n, v in given.items() if n in method.needs} | method.resolve_options(options)


def ready_lowrank(method: MergeMethod, deltas: list[LowRank], **options: Any) -> Callable[[], MergedLowRank]:
    """The call with every need made beforehand."""
    return functools.partial(method.lowrank.merge, deltas, **arguments(method, deltas[0].shape, len(deltas), options))


def merge_dense(method: MergeMethod, deltas: list[Tensor], **options: Any) -> Merged:
    return method.merge(deltas, **arguments(method, deltas[0].shape, len(deltas), options))


@each_factored
@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ((20, 24), [2, 2, 2]),  # independent row spaces
        ((20, 24), [3, 1, 2, 4]),  # ranks differ
        ((10, 40), [4, 4, 4]),  # column spaces overlap
        ((40, 10), [4, 4, 4]),  # row spaces overlap
        ((16, 12), [3]),  # one expert
        ((2, 14, 16), [2, 3]),  # batch axis
    ],
)
def test_factored_equals_dense(method: MergeMethod, shape: tuple[int, ...], ranks: list[int]) -> None:
    """And the factors of the experts are left as they are."""
    deltas = random_lowrank(ranks, *shape)
    before = [(d.b_OR.clone(), d.a_RI.clone()) for d in deltas]
    found, expected = merge_lowrank(method, deltas), merge_dense(method, [d.dense() for d in deltas])
    assert all(torch.equal(b, d.b_OR) and torch.equal(a, d.a_RI) for (b, a), d in zip(before, deltas, strict=True))
    assert found.value.shape == shape
    assert found.value.rank <= sum(ranks)
    assert relative_error(found.value.dense(), expected.value) <= 1e-10
    assert found.stats.get("rank", 0) == expected.stats.get("rank", 0)


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "average": [{"weights": [0.5, -1.0, 2.5]}],
    "task_arithmetic": [{"scaling": 0.3, "weights": [0.5, 2.0, 1.0]}],
    "cart": [{}, {"rank": 0.3, "scaling": 2.3}, {"rank": 0.16, "rounding": "up"}],
    "dc_merge": [{"density": 0.1}, {"k": 3, "smoothing": "linear", "density": 0.2}],
    "iso_c": [{}, {"mean": "rank"}, {"weights": [1.0, -2.0, 0.5]}],
    "ct_merging": [{}, {"k": 2, "common": 1}],
    "iso_cts": [{}, {"common_fraction": 0.25}, {"weights": [1.0, -2.0, 0.5]}],
    "tsv": [{}, {"k": 2}, {"k": 0}, {"min_k": 1, "weights": [1.0, -2.0, 0.5]}],
    "knots": [
        {"rule": rule, "order": order}
        for rule in ("ties", "dare", "task_arithmetic", "tsv", "iso_c")
        for order in ("official", "actmat")
    ],
}


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (5, 40)], ids=str)
@pytest.mark.parametrize(("name", "options"), [pytest.param(n, o, id=f"{n}-{o}") for n in OPTIONS for o in OPTIONS[n]])
def test_factored_equals_dense_with_options(name: str, options: dict[str, Any], shape: tuple[int, int]) -> None:
    deltas = random_lowrank([4, 4, 4], *shape)
    found = merge_lowrank(get_method(name), deltas, **options)
    dense = merge_dense(get_method(name), [d.dense() for d in deltas], **options)
    assert found.value.shape == shape
    assert found.value.rank <= 12
    assert relative_error(found.value.dense(), dense.value) <= 1e-10
    differing = {k for k in found.stats.keys() | dense.stats.keys() if found.stats.get(k) != dense.stats.get(k)}
    assert not differing


NULL_SENSITIVE = {"actmat_ridge", "swudi"}
"""Their filters weigh directions in which the experts hold nothing: the dense form in float32 amplifies the rounding
that it finds there, by up to `1 / ridge`, and is itself as far from the float64 answer as from the factored one."""


@each_factored
@pytest.mark.parametrize(
    ("shape", "ranks"),
    [((20, 24), [3, 1, 2, 4]), ((10, 40), [4, 4, 4]), ((2, 14, 16), [2, 3]), ((256, 320), [8, 4, 8])],
)
def test_factored_equals_dense_in_float32(method: MergeMethod, shape: tuple[int, ...], ranks: list[int]) -> None:
    """The cut-offs are the same, so that no direction is kept by one form and dropped by the other."""
    deltas = [d.to(torch.float32) for d in random_lowrank(ranks, *shape)]
    out = merge_lowrank(method, deltas).value
    assert out.b_OR.dtype == out.a_RI.dtype == torch.float32
    exact = merge_dense(method, [d.to(torch.float64).dense() for d in deltas]).value
    assert relative_error(out.dense(), exact) <= F32_PRODUCT
    if method.name not in NULL_SENSITIVE:
        assert relative_error(out.dense(), merge_dense(method, [d.dense() for d in deltas]).value) <= F32_PRODUCT


@each_factored
def test_a_zero_adapter_is_no_trouble(method: MergeMethod) -> None:
    deltas = random_lowrank([2, 2, 2], 20, 24)
    deltas[1] = LowRank(torch.zeros_like(deltas[1].b_OR), deltas[1].a_RI)
    out = merge_lowrank(method, deltas).value.dense()
    assert relative_error(out, merge_dense(method, [d.dense() for d in deltas]).value) <= 1e-10


WEIGHTS = (None, [1.0, 0.5], [0.0, 0.0], [1.0, -1.0])


def all_options(method: MergeMethod) -> list[dict[str, Any]]:
    """Options of which one has each value of its type that may matter, the rest their defaults."""
    out = variants(method)
    for name, option in method.options.items():
        if option.default is None and option.bounds is not None:
            out += [{name: 0.5}]
        elif option.bounds is not None and option.bounds.low is not None:
            out += [{name: type(option.default)(1)}]
    fitting = (v for v in out if all(method.options[name].problem(value) is None for name, value in v.items()))
    return [method.resolve_options(variant) for variant in fitting]


def raised(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except (ValueError, RecipeError) as error:
        return error
    return None


@pytest.mark.parametrize(
    ("method", "weights"),
    [pytest.param(m, w, id=f"{m.name}-{w}") for m in FACTORED for w in (WEIGHTS if m.is_weighted else [None])],
)
def test_it_is_declared_when_the_low_rank_form_applies(method: MergeMethod, weights: list[float] | None) -> None:
    """`why_dense` gives the first sentence of the error that the form raises, and nothing where it merges."""
    deltas = random_lowrank([2, 1], 6, 9)
    given = needs_for((6, 9), 2) | {"weights": weights}
    needs = {n: v for n, v in given.items() if n in method.needs}
    for options in all_options(method):
        error = raised(functools.partial(method.lowrank.merge, deltas, **needs, **options))
        if isinstance(error, RecipeError):  # weights that no form takes
            assert weights is not None
            assert method.weights_problem(options, weights) == str(error)
        else:
            said = None if error is None else str(error).partition(". ")[0]
            assert method.why_dense(options, 2, weights) == said, options


def test_options_that_take_the_low_rank_form_away_are_all_known() -> None:
    """The comparison above meets every kind of reason; methods without the form give theirs."""
    found = {
        (m.name, name, value)
        for m in FACTORED
        for options in all_options(m)
        if m.why_dense(options, 2) is not None
        for name, value in options.items()
        if value != m.options[name].default
    }
    assert found == {
        ("actmat", "form", "weight"),
        ("actmat", "trim", 0.5),
        ("iso_c", "null", "fill"),
        ("linear", "normalize", False),
        ("regmean", "form", "weight"),
        ("tsv", "rank_aware", False),
        ("wudi", "optimizer", "adam"),
    }
    reasons = {m.name: m.why_dense(m.resolve_options({}), 2) for m in all_methods() if m.lowrank is None}
    assert reasons["ties"] == "ties acts on single entries"


def off_the_rows(method: MergeMethod) -> float:
    """The largest share of a merged delta outside the joint row space of the experts, over all options."""
    deltas, shares = random_lowrank([2, 3], 12, 16), []
    q_IQ = torch.linalg.qr(torch.cat([d.a_RI.mT for d in deltas], dim=-1)).Q
    for options in all_options(method):
        if method.why_dense(options, 2) is None:
            needs = {n: v for n, v in needs_for((12, 16), 2).items() if n in method.needs}
            out = method.lowrank.merge(deltas, **needs, **options).value.dense()
            shares.append(float((out - out @ q_IQ @ q_IQ.mT).norm() / out.norm()) if out.any() else 0.0)
    return max(shares)


@pytest.mark.parametrize("method", [m for m in FACTORED if not m.needs_statistics], ids=lambda m: m.name)
def test_the_row_space_is_kept_exactly_where_it_is_declared(method: MergeMethod) -> None:
    assert (off_the_rows(method) < 1e-10) == method.keeps_row_space


@pytest.mark.parametrize("name", ["actmat", "actmat_ridge"])
def test_experts_with_independent_rows_are_all_met(name: str) -> None:
    """`D* D_t^T = D_t D_t^T` for all experts, as the ridge vanishes."""
    method = get_method(name)
    deltas = random_lowrank([2, 2], 12, 40)
    options = method.resolve_options({"ridge": 1e-9} if "ridge" in method.options else {})
    merged = method.lowrank.merge(deltas, **options).value.dense()
    on_rows = [(merged @ d.dense().mT, d.dense() @ d.dense().mT) for d in deltas]
    assert max(relative_error(found, own) for found, own in on_rows) < 1e-6


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize(
    "method",
    [m for m in FACTORED if not m.needs_statistics and "statistics" not in m.needs],  # a Gram is itself I x I
    ids=lambda m: m.name,
)
def test_no_dense_matrix_is_formed(method: MergeMethod) -> None:
    deltas = random_lowrank([2, 3, 2], 280, 300)  # larger than the histograms of a selection, whose size is fixed
    ready = ready_lowrank(method, deltas)
    with Largest() as largest:
        ready()
    assert 0 < largest.numel < 280 * 300


# Every law that a method declares, on well-conditioned and on rank-deficient experts, in float64.


LAW_TOLERANCE = 1e-12
N_OUT, N_IN = 9, 12
Rule = Callable[[Experts], Tensor]

INPUTS = {
    "full": Experts.random(4, (N_OUT, N_IN), seed=1),
    "rank_deficient": Experts.random(4, (N_OUT, N_IN), rank=2, seed=2),
    "tall": Experts.random(3, (N_IN, N_OUT), seed=3),
    "few_rows": Experts.random(2, (3, N_IN), seed=4),
}


def permutation(rule: Rule, experts: Experts) -> float:
    return relative_error(rule(experts.permuted(list(range(len(experts.deltas)))[::-1])), rule(experts))


def single(rule: Rule, experts: Experts) -> float:
    return relative_error(rule(experts.with_deltas(experts.deltas[:1])), experts.deltas[0])


def identical(rule: Rule, experts: Experts) -> float:
    same = experts.with_deltas([experts.deltas[0].clone() for _ in experts.deltas])
    return relative_error(rule(same), experts.deltas[0])


def homogeneous(rule: Rule, experts: Experts) -> float:
    return relative_error(rule(experts.with_deltas([3.7 * d for d in experts.deltas])), 3.7 * rule(experts))


def odd(rule: Rule, experts: Experts) -> float:
    return relative_error(rule(experts.with_deltas([-d for d in experts.deltas])), -rule(experts))


def left_orthogonal(rule: Rule, experts: Experts) -> float:
    q_OO, n_in = orthogonal(experts.base.shape[0], 5), experts.base.shape[1]
    return relative_error(rule(experts.rotated(q_OO, torch.eye(n_in, dtype=torch.float64))), q_OO @ rule(experts))


def right_orthogonal(rule: Rule, experts: Experts) -> float:
    n_out, p_II = experts.base.shape[0], orthogonal(experts.base.shape[1], 6)
    return relative_error(rule(experts.rotated(torch.eye(n_out, dtype=torch.float64), p_II)), rule(experts) @ p_II)


def orthogonal_rows_sum(rule: Rule, experts: Experts) -> float:
    n_in = experts.base.shape[-1]
    basis = orthogonal(n_in, 8)
    share = n_in // len(experts.deltas)
    spaces = [basis[t * share : (t + 1) * share] for t in range(len(experts.deltas))]
    apart = experts.with_deltas([d @ v.mT @ v for d, v in zip(experts.deltas, spaces, strict=True)])
    return relative_error(rule(apart), torch.stack(apart.deltas).sum(0))


def zero_expert(rule: Rule, experts: Experts) -> float:
    some = experts.with_deltas(experts.deltas[:-1])
    return relative_error(rule(experts.with_deltas([*some.deltas, torch.zeros_like(experts.base)])), rule(some))


def zeros(rule: Rule, experts: Experts) -> float:
    nothing = rule(experts.with_deltas([torch.zeros_like(d) for d in experts.deltas]))
    return float("inf") if nothing.any() else 0.0


CHECKS: dict[str, Callable[[Rule, Experts], float]] = {
    "permutation": permutation,
    "single": single,
    "identical": identical,
    "homogeneous": homogeneous,
    "odd": odd,
    "left_orthogonal": left_orthogonal,
    "right_orthogonal": right_orthogonal,
    "orthogonal_rows_sum": orthogonal_rows_sum,
    "zero_expert": zero_expert,
    "zeros": zeros,
}


def gap(law: str, method: MergeMethod, experts: Experts, **options: Any) -> float:
    """How far a method is from obeying a law on these experts, as many of them as it takes."""
    some = experts.with_deltas(experts.deltas[: usable_experts(method, len(experts.deltas))])
    return CHECKS[law](functools.partial(merged, method, **options), some)


@pytest.mark.parametrize("method", [m for m in all_methods() if "homogeneous" in m.laws], ids=lambda m: m.name)
def test_homogeneous_methods_are_so_at_any_size(method: MergeMethod) -> None:
    """Deltas from 1e-31 to 1e29."""
    for dtype, exponent in itertools.product((torch.float32, torch.float64), (-100, -50, 50, 100)):
        experts = Experts.random(usable_experts(method, 3), (N_OUT, N_IN), seed=1).to(dtype)
        far = experts.with_deltas([torch.ldexp(d, torch.tensor(exponent)) for d in experts.deltas])
        found = merged(method, far).double() * 2.0**-exponent
        assert relative_error(found, merged(method, experts)) <= F32_ELEMENTWISE, (dtype, exponent)


@pytest.mark.parametrize("method", all_methods(), ids=lambda m: m.name)
def test_declared_laws_hold(method: MergeMethod) -> None:
    gaps = {(law, name): gap(law, method, experts) for law in method.laws for name, experts in INPUTS.items()}
    assert not {key: found for key, found in gaps.items() if not found <= LAW_TOLERANCE}


SPECTRAL_LAWS = ("permutation", "odd", "left_orthogonal", "right_orthogonal", "zeros")
LAWS_UNDER_OPTIONS = [
    *(("dc_merge", "tall", o, tuple(sorted(get_method("dc_merge").laws)))
      for o in ({"density": 0.1}, {"density": 0.3, "k": 2, "smoothing": "linear"})),
    *(("knots", "full", {"rule": rule, "order": order}, SPECTRAL_LAWS)
      for rule in ("task_arithmetic", "tsv", "iso_c") for order in ("official", "actmat")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "experts", "options", "laws"), LAWS_UNDER_OPTIONS, ids=str)
def test_laws_hold_under_options(name: str, experts: str, options: dict[str, Any], laws: Collection[str]) -> None:
    assert max(gap(law, get_method(name), INPUTS[experts], **options) for law in laws) < 1e-10


@pytest.mark.parametrize(
    ("name", "law", "options"),
    [("actmat_ridge", "single", {}), ("swudi", "identical", {"time": 1.0}), ("regmean", "zero_expert", {})],
)
def test_laws_that_are_not_declared_do_not_hold(name: str, law: str, options: dict[str, Any]) -> None:
    """The declarations are complete: other laws fail by far. (At time 300 the flow of swudi has all but arrived.)"""
    assert law not in get_method(name).laws
    assert gap(law, get_method(name), INPUTS["few_rows"], **options) > 1e-3
