"""Spaces of adapters and steps of post-processing: transcriptions, laws, forms on factors."""

import math
from typing import Any

import pytest
import torch
from tests.helpers.spectra import gaussian_of, orthogonal
from tests.tolerances import F32_PRODUCT, F64_ORACLE, relative_error
from torch import Tensor

from actmat.api.matrices import merge_matrices
from actmat.errors import AlignmentError, RecipeError
from actmat.linalg.lowrank import LowRank, core_bases
from actmat.methods import Merged, MergeMethod, all_methods, get_method
from actmat.methods.post import STEPS, PostStep, Step, apply_steps, get_step
from actmat.methods.spaces import merge_in_core, merge_in_factors, space_problems, space_words

# Spaces of adapters: the core loses nothing, factors are merged apart, Pico damps what experts share.


# Spaces of adapters: the core loses nothing, linear rules do not see it, and factors are merged apart.


Pairs = list[tuple[Tensor, Tensor]]


def adapters(rows: int = 10, columns: int = 14, ranks: tuple[int, ...] = (2, 3, 2), seed: int = 0) -> Pairs:
    gaussian = gaussian_of(seed)
    return [(gaussian(rows, r), gaussian(r, columns)) for r in ranks]


def dense(pairs: Pairs) -> list[Tensor]:
    return [b @ a for b, a in pairs]


COUNTING = {"tsv", "iso_c", "iso_cts", "actmat_ridge", "dc_merge"}
"""Methods with ranks or means over the sides of the matrix: directions per expert, mean singular or eigenvalue."""

IN_CORE = [
    m for m in all_methods() if m.name != "adamerging" and not space_problems("core", m, m.resolve_options({}), 3)
    and m.max_experts is None
]  # fmt: skip


def test_the_core_loses_nothing() -> None:
    for ranks in ((2, 3, 2), (6, 5, 4), (1,)):  # below, above and at one expert's rank
        pairs = [LowRank(b, a) for b, a in adapters(ranks=ranks)]
        bases, retries = core_bases(pairs)
        assert retries == ()
        assert bases.cores_PQ[0].shape == (min(10, sum(ranks)), min(14, sum(ranks)))
        for pair, core in zip(pairs, bases.cores_PQ, strict=True):
            assert relative_error(bases.lift(core).dense(), pair.dense()) <= F64_ORACLE
        for basis in (bases.left.dense(), bases.right.dense()):
            torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[-1], dtype=torch.float64))


@pytest.mark.parametrize("method", IN_CORE, ids=lambda m: m.name)
def test_the_plan_says_which_methods_the_core_changes(method: MergeMethod) -> None:
    pairs = adapters()
    options = {"rtol": 1e-12} if "rtol" in method.options else {}
    options |= {"epsilon": 0.3} if method.name == "ram" else {}  # by default all entries here count as changed
    words = space_words("core", method, method.resolve_options(options))
    found = merge_matrices(method.name, pairs, space="core", **options)
    full = merge_matrices(method.name, dense(pairs), **options)
    if "(equal to the full space)" in words:
        assert relative_error(found, full) <= F64_ORACLE
    elif "not the result" in words:
        # where row spaces are independent, as here, the rule of ACTMat has one answer whatever the estimates are
        assert relative_error(found, full) > 1e-3 or method.preset_of == "actmat"
    else:
        assert "counts of its sides" in words
        if method.name not in COUNTING:
            assert relative_error(found, full) <= F64_ORACLE


def test_ties_of_factors_is_ties_of_each() -> None:
    pairs = adapters(ranks=(3, 3, 3))
    found = merge_matrices("ties", pairs, space="factors", density=0.4)
    b, a = (merge_matrices("ties", [p[side] for p in pairs], density=0.4) for side in (0, 1))
    assert torch.equal(found, b @ a)
    weights = [1.0, 4.0, 0.25]
    weighted = merge_matrices("ties", pairs, space="factors", weights=weights, density=0.4)
    roots = [math.sqrt(w) for w in weights]
    b, a = (merge_matrices("ties", [p[side] for p in pairs], weights=roots, density=0.4) for side in (0, 1))
    assert torch.equal(weighted, b @ a)
    taken = merge_matrices("task_arithmetic", pairs, space="factors", weights=[1.0, -1.0, 0.0], scaling=1.0)
    expected = (pairs[0][0] + pairs[1][0]) @ (pairs[0][1] - pairs[1][1])
    assert relative_error(taken, expected) <= F64_ORACLE, "the sign is on a"


def test_dare_of_factors_is_the_sum_of_factors_on_average() -> None:
    pairs = adapters(ranks=(2, 2), rows=6, columns=5)
    options = {"density": 0.5, "rule": "task_arithmetic", "scaling": 1.0}
    generator = torch.Generator().manual_seed(1)
    draws = [merge_matrices("dare", pairs, space="factors", generator=generator, **options) for _ in range(400)]
    expected = (pairs[0][0] + pairs[1][0]) @ (pairs[0][1] + pairs[1][1])
    stacked = torch.stack(draws)
    error = (stacked.mean(0) - expected) / (stacked.std(0) / 20)
    assert float(error.abs().max()) < 4.5, "the masks of A and B are not independent, or not rescaled"
    again = [merge_matrices("dare", pairs, space="factors", **options) for _ in range(2)]
    assert torch.equal(*again)
    core = torch.stack(
        [merge_matrices("dare", pairs, space="core", generator=generator, **options) for _ in range(400)]
    )
    error = (core.mean(0) - sum(dense(pairs))) / (core.std(0) / 20)
    assert float(error.abs().max()) < 4.5


def test_zero_deltas_may_have_another_rank() -> None:
    zero = LowRank(torch.zeros(10, 1, dtype=torch.float64), torch.zeros(1, 14, dtype=torch.float64))
    pairs = [LowRank(b, a) for b, a in adapters(ranks=(3, 3))]
    ties = get_method("ties")
    options = ties.resolve_options({"density": 0.4})
    for merge in (merge_in_core, merge_in_factors):
        without = merge(ties, pairs, {"weights": None, **options}).value.dense()
        found = merge(ties, [*pairs, zero], {"weights": None, **options}).value.dense()
        assert relative_error(found, without) <= F64_ORACLE


def test_records_tell_the_core_and_both_sides() -> None:
    pairs = [LowRank(b, a) for b, a in adapters(ranks=(2, 2))]
    ties = get_method("ties")
    options = ties.resolve_options({"density": 0.4})
    assert merge_in_core(ties, pairs, options).stats["core"] == "4x4"
    assert {"b_kept_fraction", "a_kept_fraction"} <= merge_in_factors(ties, pairs, options).stats.keys()


@pytest.mark.parametrize(
    ("space", "method", "options", "words"),
    [
        ("core", "regmean", {}, "takes statistics"),
        ("core", "karcher", {"include_base": True}, "reads the base"),
        ("core", "ties", {"trim": "global"}, "trim=tensor"),
        ("factors", "tsv", {}, "a factor is half of one"),
        ("pico", "ties", {}, "acts on single entries; use a method that merges factors"),
    ],
)
def test_methods_that_a_space_has_no_place_for(space: Any, method: str, options: dict[str, Any], words: str) -> None:
    chosen = get_method(method)
    (problem,) = space_problems(space, chosen, chosen.resolve_options(options), 3)
    assert words in problem
    assert method in problem
    assert space_problems("full", chosen, chosen.resolve_options(options), 3) == []
    if method != "regmean" and not chosen.uses_base(chosen.resolve_options(options)):
        with pytest.raises(RecipeError, match="cannot merge in this space"):
            merge_matrices(method, adapters(ranks=(2, 2)), space=space, **options)


def test_wrong_arguments_are_told() -> None:
    pairs = adapters(ranks=(2, 3))
    other: Any = {"space": "kernel"}
    with pytest.raises(RecipeError, match=r"expert 0 \(counted from 0\) is Tensor"):
        merge_matrices("ties", dense(pairs), space="core")
    with pytest.raises(RecipeError, match="go with another space, such as 'core'"):
        merge_matrices("ties", pairs)
    with pytest.raises(RecipeError, match="space is one of full, core, factors, pico; got 'kernel'"):
        merge_matrices("ties", pairs, **other)
    with pytest.raises(AlignmentError, match=r"ranks differ: \[2, 3\]"):
        merge_matrices("ties", pairs, space="factors")
    with pytest.raises(RecipeError, match="must be as many"):
        merge_matrices("ties", [(pairs[0][0], pairs[1][1])], space="core")
    with pytest.raises(AlignmentError, match="have one shape"):
        merge_matrices("ties", [pairs[0], (pairs[0][0][:4], pairs[0][1])], space="core")
    with pytest.raises(RecipeError, match="expected deltas, found none"):
        merge_matrices("ties", [], space="core")
    with pytest.raises(RecipeError, match="is no step"):
        merge_matrices("average", dense(pairs), post="isotropize:mean")
    with pytest.raises(RecipeError, match="no option 'beta'"):
        merge_matrices("average", dense(pairs), post="isotropize:beta=1")
    with pytest.raises(AlignmentError, match="'isotropize' changes matrices"):
        merge_matrices("average", [torch.ones(3)], post="isotropize")


# Pico against a plain transcription of its equations, its laws, and its refusals.


METHODS = ("average", "task_arithmetic", "actmat", "tsv", "dc_merge", "cart")


def pico_adapters(
    rows: int = 12, columns: int = 16, ranks: tuple[int, ...] = (2, 3, 2), *, shared: float = 3.0
) -> Pairs:
    """Factors with one output direction that all experts share."""
    gaussian = gaussian_of(7)
    common = gaussian(rows, 1)
    return [(gaussian(rows, r) + shared * common, gaussian(r, columns)) for r in ranks]


def calibrated(pairs: Pairs) -> list[Tensor]:
    """The paper's equations, direction by direction: `s_j = sigma_j^2 / sum`, `alpha_j = 1 / (1 + (T - 1) s_j)`."""
    u, sigma, _ = torch.linalg.svd(torch.cat([b for b, _ in pairs], 1), full_matrices=False)
    out = []
    for b, a in pairs:
        moved = b.clone()
        for j in range(len(sigma)):
            score = float(sigma[j] ** 2 / (sigma**2).sum())
            alpha = 1 / (1 + (len(pairs) - 1) * score)
            moved += (alpha - 1) * torch.outer(u[:, j], u[:, j] @ b)
        out.append(moved @ a)
    return out


@pytest.mark.parametrize("method", METHODS)
def test_the_method_sees_calibrated_deltas_and_the_result_has_the_mean_norm(method: str) -> None:
    pairs = pico_adapters()
    expected = merge_matrices(method, calibrated(pairs))
    mean = sum(float(d.norm()) for d in dense(pairs)) / len(pairs)
    found = merge_matrices(method, pairs, space="pico")
    assert relative_error(found, expected * mean / expected.norm()) <= F64_ORACLE
    assert relative_error(found, merge_matrices(method, dense(pairs))) > 1e-2  # it is another merge


def test_one_expert_and_experts_without_the_module_change_nothing() -> None:
    pairs = pico_adapters()
    assert relative_error(merge_matrices("average", pairs[:1], space="pico"), dense(pairs)[0]) <= F64_ORACLE
    zero = (torch.zeros(12, 2, dtype=torch.float64), torch.zeros(2, 16, dtype=torch.float64))
    found = merge_matrices("task_arithmetic", [*pairs, zero], space="pico")
    assert relative_error(found, merge_matrices("task_arithmetic", pairs, space="pico")) <= F64_ORACLE
    assert not merge_matrices("average", [zero, zero], space="pico").any()


# Steps of post-processing: naive transcriptions in float64, laws, and forms on factors.


SHAPES = [(9, 9), (6, 11), (11, 6)]


def experts(rows: int, columns: int, *, count: int = 3, rank: int = 0, seed: int = 0) -> list[Tensor]:
    gaussian = gaussian_of(seed)
    common = gaussian(rows, columns)
    if rank:
        return [gaussian(rows, rank) @ gaussian(rank, columns) for _ in range(count)]
    return [common + gaussian(rows, columns) for _ in range(count)]


def run(name: str, merged: Tensor, deltas: list[Tensor], **options: Any) -> Merged:
    """A step with its defaults overlaid, as a merge calls it."""
    step = get_step(name)
    return apply_steps(merged, deltas, [Step(name, step.resolve_options(options))])


def test_isotropize_is_iso_c_of_a_sum() -> None:
    deltas = experts(6, 9)
    for mean in ("all", "rank", "rms"):
        expected = merge_matrices("iso_c", deltas, mean=mean)
        found = merge_matrices("task_arithmetic", deltas, scaling=1.0, post=[f"isotropize:mean={mean}"])
        assert relative_error(found, expected) <= F64_ORACLE


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_factored_and_dense_forms_agree(step: PostStep) -> None:
    rng = torch.Generator().manual_seed(3)
    pairs = [
        LowRank(*(torch.randn(s, generator=rng, dtype=torch.float64) for s in ((10, r), (r, 12)))) for r in (1, 2, 3)
    ]
    merged = LowRank(torch.cat([p.b_OR for p in pairs], -1), torch.cat([p.a_RI for p in pairs], -2))
    options = step.resolve_options({"beta": 0.5} if step.name == "subspace_boosting" else {})
    dense = step.apply(merged.dense(), [p.dense() for p in pairs], **options)
    factored = step.apply_lowrank(merged, pairs, **options)
    assert relative_error(factored.value.dense(), dense.value) <= F64_ORACLE
    assert factored.value.rank <= merged.rank
    assert dict(factored.stats).keys() == dict(dense.stats).keys()


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_leave_zeros_null_directions_and_inputs(step: PostStep, dtype: torch.dtype) -> None:
    zero = torch.zeros(5, 4, dtype=dtype)
    assert not run(step.name, zero, [zero, zero]).value.any()
    deltas = [d.to(dtype) for d in experts(8, 7, rank=2, count=2)]
    merged, kept = deltas[0] + deltas[1], [d.clone() for d in deltas]
    before = merged.clone()
    found = run(step.name, merged, deltas)
    assert found.value.dtype == dtype
    values = torch.linalg.svdvals(found.value.double())
    assert float(values[4]) <= F32_PRODUCT * float(values[0]), "a null direction was raised"
    assert torch.equal(merged, before)
    assert all(torch.equal(d, k) for d, k in zip(deltas, kept, strict=True))


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_steps_commute_with_rotations_and_with_scaling(step: PostStep) -> None:
    deltas = experts(6, 8)
    merged = sum(deltas[1:], deltas[0])
    left, right = orthogonal(6, 4), orthogonal(8, 5)
    plain = run(step.name, merged, deltas).value
    turned = run(step.name, left @ merged @ right, [left @ d @ right for d in deltas]).value
    assert relative_error(turned, left @ plain @ right) <= F64_ORACLE
    assert relative_error(run(step.name, 7 * merged, [7 * d for d in deltas]).value, 7 * plain) <= F64_ORACLE


def test_steps_work_on_batches() -> None:
    stacks = [torch.stack(pair) for pair in zip(experts(5, 6), experts(5, 6, seed=1), strict=True)]
    merged = sum(stacks[1:], stacks[0])
    for step in STEPS.values():
        found = run(step.name, merged, stacks).value
        for e in range(2):
            assert relative_error(found[e], run(step.name, merged[e], [s[e] for s in stacks]).value) <= F64_ORACLE


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_mean_norm_is_that_of_the_experts_that_change_the_matrix(shape: tuple[int, int]) -> None:
    deltas = [*experts(*shape), torch.zeros(shape, dtype=torch.float64)]
    merged = 9 * sum(deltas[1:], deltas[0])
    found = run("mean_norm", merged, deltas).value
    mean = sum(math.sqrt(sum(float(x) ** 2 for x in d.flatten())) for d in deltas[:3]) / 3
    assert relative_error(found, merged * (mean / float(merged.norm()))) <= F64_ORACLE
