"""Spaces of adapters: the core loses nothing, factors are merged apart, Pico damps what experts share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.tolerances import F64_ORACLE
from torch import Tensor

from actmat.errors import AlignmentError, RecipeError
from actmat.extras.research.matrices import merge_matrices
from actmat.linalg.lowrank import LowRank, core_bases
from actmat.methods import MergeMethod, all_methods, get_method
from actmat.methods.spaces import merge_in_core, merge_in_factors, space_problems, space_words

# Spaces of adapters: the core loses nothing, linear rules do not see it, and factors are merged apart.


Pairs = list[tuple[Tensor, Tensor]]


def adapters(rows: int = 10, columns: int = 14, ranks: tuple[int, ...] = (2, 3, 2), seed: int = 0) -> Pairs:
    rng = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    return [(gaussian(rows, r), gaussian(r, columns)) for r in ranks]


def dense(pairs: Pairs) -> list[Tensor]:
    return [b @ a for b, a in pairs]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


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
            assert distance(bases.lift(core).dense(), pair.dense()) <= F64_ORACLE
        for basis in (bases.p_OP, bases.q_IQ):
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
        assert distance(found, full) <= F64_ORACLE
    elif "not the result" in words:
        # where row spaces are independent, as here, the rule of ACTMat has one answer whatever the estimates are
        assert distance(found, full) > 1e-3 or method.preset_of == "actmat"
    else:
        assert "counts of its sides" in words
        if method.name not in COUNTING:
            assert distance(found, full) <= F64_ORACLE


def test_ties_in_the_core_is_ties_on_the_cores() -> None:
    pairs = adapters()
    b, a = torch.cat([b for b, _ in pairs], 1), torch.cat([a for _, a in pairs], 0)
    u, v = torch.linalg.svd(b, full_matrices=False)[0], torch.linalg.svd(a, full_matrices=False)[2].mT
    cores = [u.mT @ d @ v for d in dense(pairs)]
    expected = u @ merge_matrices("ties", cores, density=0.3) @ v.mT
    found = merge_matrices("ties", pairs, space="core", density=0.3)
    assert distance(found, expected) <= F64_ORACLE
    assert distance(merge_matrices("ties", pairs[::-1], space="core", density=0.3), found) <= F64_ORACLE, "order"
    scaled = [(2 * b, 2 * a) for b, a in pairs]
    assert distance(merge_matrices("ties", scaled, space="core", density=0.3), 4 * found) <= F64_ORACLE, "scale"


def test_isotropizing_in_the_core_takes_the_mean_over_the_core() -> None:
    pairs = adapters()
    total = sum(dense(pairs))
    assert isinstance(total, Tensor)
    u, s, vh = torch.linalg.svd(total, full_matrices=False)
    rank = 7
    expected = float(s[:rank].sum()) / rank * u[:, :rank] @ vh[:rank]
    given: dict[str, Any] = {"scaling": 1.0, "post": "isotropize"}
    found = merge_matrices("task_arithmetic", pairs, space="core", **given)
    assert distance(found, expected) <= F64_ORACLE
    full = merge_matrices("task_arithmetic", dense(pairs), **given)
    assert distance(full, expected * rank / 10) <= F64_ORACLE, "the full space divides by min(O, I)"


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
    assert distance(taken, (pairs[0][0] + pairs[1][0]) @ (pairs[0][1] - pairs[1][1])) <= F64_ORACLE, "the sign is on a"


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
        without = merge(ties, pairs, {"weights": None}, options).value.dense()
        found = merge(ties, [*pairs, zero], {"weights": None}, options).value.dense()
        assert distance(found, without) <= F64_ORACLE


def test_records_tell_the_core_and_both_sides() -> None:
    pairs = [LowRank(b, a) for b, a in adapters(ranks=(2, 2))]
    ties = get_method("ties")
    options = ties.resolve_options({"density": 0.4})
    assert merge_in_core(ties, pairs, {}, options).stats["core"] == "4x4"
    assert {"b_kept_fraction", "a_kept_fraction"} <= merge_in_factors(ties, pairs, {}, options).stats.keys()


@pytest.mark.parametrize(
    ("space", "method", "options", "words"),
    [
        ("core", "regmean", {}, "takes statistics"),
        ("core", "karcher", {"include_base": True}, "reads the base"),
        ("core", "ties", {"trim": "global"}, "trim=tensor"),
        ("factors", "tsv", {}, "a factor is half of one"),
    ],
)
def test_methods_that_a_space_has_no_place_for(space: Any, method: str, options: dict[str, Any], words: str) -> None:
    chosen = get_method(method)
    (problem,) = space_problems(space, chosen, chosen.resolve_options(options), 3)
    assert words in problem
    assert f"'{method}'" in problem
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
    rng = torch.Generator().manual_seed(7)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

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
    assert distance(found, expected * mean / expected.norm()) <= F64_ORACLE
    assert distance(found, merge_matrices(method, dense(pairs))) > 1e-2  # it is another merge


def test_a_direction_that_all_share_is_damped_most() -> None:
    pairs = pico_adapters(shared=20.0)
    u = torch.linalg.svd(torch.cat([b for b, _ in pairs], 1), full_matrices=False).U
    before, after = dense(pairs), calibrated(pairs)
    kept = [float((u.mT @ x).norm(dim=1)[0] / (u.mT @ y).norm(dim=1)[0]) for x, y in zip(after, before, strict=True)]
    assert max(kept) < 0.4  # towards 1 / T
    found = merge_matrices("task_arithmetic", pairs, space="pico")
    plain = merge_matrices("task_arithmetic", dense(pairs))
    ratio = (u.mT @ found).norm(dim=1) / (u.mT @ plain).norm(dim=1)
    assert int(ratio.argmin()) == 0


def test_one_expert_and_experts_without_the_module_change_nothing() -> None:
    pairs = pico_adapters()
    assert distance(merge_matrices("average", pairs[:1], space="pico"), dense(pairs)[0]) <= F64_ORACLE
    zero = (torch.zeros(12, 2, dtype=torch.float64), torch.zeros(2, 16, dtype=torch.float64))
    found = merge_matrices("task_arithmetic", [*pairs, zero], space="pico")
    assert distance(found, merge_matrices("task_arithmetic", pairs, space="pico")) <= F64_ORACLE
    assert not merge_matrices("average", [zero, zero], space="pico").any()


def test_the_order_of_experts_changes_nothing() -> None:
    pairs = pico_adapters()
    found = merge_matrices("cart", pairs, space="pico")
    assert distance(merge_matrices("cart", pairs[::-1], space="pico"), found) <= F64_ORACLE


def test_methods_without_a_form_on_factors_are_refused() -> None:
    chosen = get_method("ties")
    problems = space_problems("pico", chosen, chosen.resolve_options({}), 3)
    assert any("acts on single entries" in p and "dc_merge" in p for p in problems)


def test_a_call_in_a_space_that_does_not_serve_is_refused() -> None:
    with pytest.raises(RecipeError, match="cannot merge in this space"):
        merge_matrices("ties", pico_adapters(), space="pico")


def test_the_plan_says_what_is_done() -> None:
    method = get_method("tsv")
    assert "mean norm" in space_words("pico", method, method.resolve_options({}))
