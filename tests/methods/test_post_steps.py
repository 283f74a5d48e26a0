"""Steps of post-processing: naive transcriptions in float64, laws, and forms on factors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.tolerances import F32_PRODUCT, F64_ORACLE
from torch import Tensor

from actmat.errors import RecipeError
from actmat.linalg.lowrank import LowRank
from actmat.methods import Merged
from actmat.methods.post import STEPS, PostStep, apply_steps, get_step

SHAPES = [(9, 9), (6, 11), (11, 6)]


def experts(rows: int, columns: int, *, count: int = 3, rank: int = 0, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    common = gaussian(rows, columns)
    if rank:
        return [gaussian(rows, rank) @ gaussian(rank, columns) for _ in range(count)]
    return [common + gaussian(rows, columns) for _ in range(count)]


def close(found: Tensor, expected: Tensor, tolerance: float = F64_ORACLE) -> bool:
    return float((found - expected).norm()) <= tolerance * max(float(expected.norm()), 1e-300)


def run(name: str, merged: Tensor, deltas: list[Tensor], **options: Any) -> Merged:
    """A step with its defaults overlaid, as a merge calls it."""
    step = get_step(name)
    return apply_steps(merged, deltas, [(step, step.resolve_options(options))])


def boost_oracle(merged: Tensor, beta: float) -> Tensor:
    u, s, vh = torch.linalg.svd(merged, full_matrices=False)
    shares = [float(s[: k + 1].sum() / s.sum()) for k in range(len(s))]
    first = next(k for k, share in enumerate(shares) if share >= beta - 1e-12)
    return u @ torch.diag(torch.clamp(s, min=float(s[first]))) @ vh


@pytest.mark.parametrize("beta", [0.01, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boosting_is_the_equation(shape: tuple[int, int], beta: float) -> None:
    merged = sum(experts(*shape))
    assert isinstance(merged, Tensor)
    found = run("subspace_boosting", merged, [], beta=beta)
    assert close(found.value, boost_oracle(merged, beta))
    values = torch.linalg.svdvals(found.value)
    if beta == 0.01:  # the trap: the first value exceeds 1 % of the sum, and all become equal to it
        assert close(values, values[0].expand_as(values))
        assert found.stats["boosted"] == min(shape) - 1
    if beta == 1:
        assert close(found.value, merged)
        assert found.stats["boosted"] <= 1  # rounding of the cumulative sum


def test_isotropize_is_iso_c_of_a_sum() -> None:
    from actmat.extras.research.matrices import merge_matrices

    deltas = experts(6, 9)
    for mean in ("all", "rank", "rms"):
        expected = merge_matrices("iso_c", deltas, mean=mean)
        assert close(merge_matrices("task_arithmetic", deltas, scaling=1.0, post=[f"isotropize:mean={mean}"]), expected)


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
    assert close(factored.value.dense(), dense.value)
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
    left, right = (
        torch.linalg.qr(d[:, : d.shape[0]] if d.shape[0] <= d.shape[1] else d).Q for d in (deltas[0], deltas[0].mT)
    )
    right = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)).Q
    plain = run(step.name, merged, deltas).value
    turned = run(step.name, left @ merged @ right, [left @ d @ right for d in deltas]).value
    assert close(turned, left @ plain @ right)
    assert close(run(step.name, 7 * merged, [7 * d for d in deltas]).value, 7 * plain)


def test_steps_work_on_batches() -> None:
    stacks = [torch.stack(pair) for pair in zip(experts(5, 6), experts(5, 6, seed=1), strict=True)]
    merged = sum(stacks[1:], stacks[0])
    for step in STEPS.values():
        found = run(step.name, merged, stacks).value
        for e in range(2):
            assert close(found[e], run(step.name, merged[e], [s[e] for s in stacks]).value)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_mean_norm_is_that_of_the_experts_that_change_the_matrix(shape: tuple[int, int]) -> None:
    deltas = [*experts(*shape), torch.zeros(shape, dtype=torch.float64)]
    merged = 9 * sum(deltas[1:], deltas[0])
    found = run("mean_norm", merged, deltas).value
    mean = sum(math.sqrt(sum(float(x) ** 2 for x in d.flatten())) for d in deltas[:3]) / 3
    assert close(found, merged * (mean / float(merged.norm())))


def test_declarations() -> None:
    assert all(step.name == name for name, step in STEPS.items())
    assert all(o.doc for step in STEPS.values() for o in step.options.values())
    with pytest.raises(RecipeError, match="Did you mean 'isotropize'"):
        get_step("isotropise")
    with pytest.raises(RecipeError, match="post-processing 'isotropize' has no option 'beta'"):
        get_step("isotropize").resolve_options({"beta": 1})
    with pytest.raises(RecipeError, match="must lie in"):
        get_step("subspace_boosting").resolve_options({"beta": 1.5})
