"""Steps of post-processing: naive transcriptions in float64, laws, and forms on factors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.tolerances import F32_PRODUCT, F64_ORACLE
from torch import Tensor

from actmat.errors import RecipeError
from actmat.extras.post.layer_steps import conflict, effective_rank
from actmat.linalg.lowrank import LowRank
from actmat.methods import Merged
from actmat.methods.post import Layer, PostStep, all_steps, apply_steps, get_step

MATRIX_STEPS = [s for s in all_steps() if s.layers is None]
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


def svc_oracle(merged: Tensor, deltas: list[Tensor], alpha: float) -> Tensor:
    """Direction by direction, as in the paper."""
    u, s, vh = torch.linalg.svd(merged, full_matrices=False)
    out = torch.zeros_like(merged)
    for r in range(len(s)):
        own = u[:, r] @ merged
        counts = []
        for delta in deltas:
            response = u[:, r] @ delta
            square = float(response @ response)
            counts.append(max(alpha, float(own @ response) / square) if square > 0 else alpha)
        out += len(deltas) / sum(counts) * s[r] * torch.outer(u[:, r], vh[r])
    return out


def boost_oracle(merged: Tensor, beta: float) -> Tensor:
    u, s, vh = torch.linalg.svd(merged, full_matrices=False)
    shares = [float(s[: k + 1].sum() / s.sum()) for k in range(len(s))]
    first = next(k for k, share in enumerate(shares) if share >= beta - 1e-12)
    return u @ torch.diag(torch.clamp(s, min=float(s[first]))) @ vh


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_svc_is_the_equation(shape: tuple[int, int], alpha: float) -> None:
    deltas = experts(*shape)
    merged = deltas[0] + deltas[1] + deltas[2]
    found = run("svc", merged, deltas, alpha=alpha)
    assert close(found.value, svc_oracle(merged, deltas, alpha))
    assert found.stats["svc_rank"] == min(shape)
    if alpha == 1:
        assert found.stats["svc_gain_max"] <= 1
        assert float(found.value.norm()) < float(merged.norm())


def test_svc_of_one_expert_and_of_identical_ones_is_that_expert() -> None:
    (one,) = experts(7, 5, count=1)
    assert close(run("svc", one, [one]).value, one)
    assert close(run("svc", 3 * one, [one, one, one]).value, one)


def test_svc_commutes_with_scaling_where_the_absolute_floor_does_not() -> None:
    deltas = experts(8, 6)
    merged = sum(deltas[1:], deltas[0])
    plain = run("svc", merged, deltas).value
    small = [1e-9 * d for d in deltas]
    assert close(run("svc", 1e-9 * merged, small).value, 1e-9 * plain)
    floored = run("svc", 1e-9 * merged, small, floor=1e-12).value
    assert not close(floored, 1e-9 * plain, 0.1)


def test_svc_counts_alpha_for_an_expert_without_a_response() -> None:
    one = experts(6, 6, count=1)[0]
    nothing = torch.zeros_like(one)
    assert close(run("svc", one, [one, nothing]).value, svc_oracle(one, [one, nothing], 1.0))
    assert close(run("svc", one, [one, nothing], alpha=0.5).value, one * 2 / 1.5)


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


def test_isotropise_is_iso_c_of_a_sum() -> None:
    from actmat.extras.research.matrices import merge_matrices

    deltas = experts(6, 9)
    for mean in ("all", "rank", "rms"):
        expected = merge_matrices("iso_c", deltas, mean=mean)
        assert close(merge_matrices("task_arithmetic", deltas, scaling=1.0, post=[f"isotropise:mean={mean}"]), expected)


@pytest.mark.parametrize("step", MATRIX_STEPS, ids=lambda s: s.name)
def test_factored_and_dense_forms_agree(step: PostStep) -> None:
    rng = torch.Generator().manual_seed(3)
    pairs = [
        LowRank(*(torch.randn(s, generator=rng, dtype=torch.float64) for s in ((10, r), (r, 12)))) for r in (1, 2, 3)
    ]
    merged = LowRank(torch.cat([p.b_OR for p in pairs], -1), torch.cat([p.a_RI for p in pairs], -2))
    assert step.apply is not None
    assert step.apply_lowrank is not None
    options = step.resolve_options({"beta": 0.5} if step.name == "subspace_boosting" else {})
    dense = step.apply(merged.dense(), [p.dense() for p in pairs], **options)
    factored = step.apply_lowrank(merged, pairs, **options)
    assert close(factored.value.dense(), dense.value)
    assert factored.value.rank <= merged.rank
    assert dict(factored.stats).keys() == dict(dense.stats).keys()


@pytest.mark.parametrize("step", MATRIX_STEPS, ids=lambda s: s.name)
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


@pytest.mark.parametrize("step", MATRIX_STEPS, ids=lambda s: s.name)
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
    for step in MATRIX_STEPS:
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


# Layer steps


def test_esm_is_the_equation() -> None:
    step = get_step("esm").layers
    assert step is not None
    norms = {("h.0.q", ""): 1.0, ("h.1.q", ""): 2.0, ("h.0.k", ""): 5.0, ("h.1.k", ""): 0.0, ("head", ""): 3.0}
    kinds = {key: Layer(key[0].replace("0", "*").replace("1", "*"), None, 0) for key in norms}
    found = step.factors({key: (kinds[key], (norm,)) for key, norm in norms.items()})
    assert found["h.0.q", ""] == pytest.approx((1 / 1.5) ** 2)
    assert found["h.1.q", ""] == pytest.approx((2 / 1.5) ** 2)
    assert found["h.0.k", ""] == pytest.approx(4.0)
    assert found["h.1.k", ""] == 0
    assert found["head", ""] == 1
    assert step.factors({k: (kinds[k], (0.0,)) for k in norms}) == dict.fromkeys(norms, 1.0)
    assert set(step.factors({k: (kinds[k], (n,)) for k, n in norms.items()}, power=0.0).values()) <= {1.0}
    (norm,) = step.measure(torch.tensor([[3.0, 4.0]]), None)
    assert norm == step.measure(LowRank(torch.ones(1, 1), torch.tensor([[3.0, 4.0]])), None)[0] == 5.0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_larv_measures_are_the_equations(shape: tuple[int, int]) -> None:
    base, delta = experts(*shape, count=2)
    left, right = base @ delta.mT - delta @ base.mT, base.mT @ delta - delta.mT @ base
    expected = float(left.norm() + right.norm()) / (2 * float(base.norm()) * float(delta.norm()))
    assert conflict(base, delta) == pytest.approx(expected, rel=1e-10)
    assert conflict(base, 2 * base) <= 1e-7  # the root of a difference that cancels
    s = torch.linalg.svdvals(delta)
    p = s**2 / (s**2).sum()
    assert effective_rank(delta) == pytest.approx(math.exp(-float((p * p.log()).sum())), rel=1e-10)


def test_larv_factors_are_the_equation() -> None:
    step = get_step("larv").layers
    assert step is not None
    entries = {("h.0", ""): (1, 1.2, 0.3), ("h.1", ""): (2, 0.8, 0.5), ("h.2", ""): (3, 1.5, 0.1)}
    measures = {key: (Layer("h.*", n, 3), (e, c)) for key, (n, e, c) in entries.items()}
    conflicts = torch.tensor([c for _, _, c in entries.values()], dtype=torch.float64)
    z = (conflicts - conflicts.mean()) / conflicts.std(correction=0)
    found = step.factors(measures)
    for (key, (n, e, _)), own in zip(entries.items(), z, strict=True):
        score = e * (n / 3) ** 0.5 / (float(torch.nn.functional.softplus(own)) + 1)
        assert found[key] == pytest.approx(1 + math.tanh(3 * (score - 1)) / 2, rel=1e-12)
    outside = {("head", ""): (Layer("head", None, 0), (9.0, 9.0)), ("h.0", "zero"): (Layer("h.*/zero", 1, 3), ())}
    more = step.factors(measures | outside)
    assert {k: more[k] for k in found} == found, "matrices outside of the layers counted"
    assert (more["head", ""], more["h.0", "zero"]) == (1.0, 1.0)
    assert set(step.factors(measures, gamma=0.0).values()) == {1.0}
    backwards = dict(reversed(list(measures.items())))
    assert step.factors(backwards) == found


def test_declarations() -> None:
    assert len({s.name for s in all_steps()}) == len(all_steps())
    for step in all_steps():
        assert (step.apply is None) == (step.apply_lowrank is None) == (step.layers is not None)
        assert all(o.doc for o in step.options.values()), step.name
    with pytest.raises(RecipeError, match="Did you mean 'svc'"):
        get_step("scv")
    with pytest.raises(RecipeError, match="post-processing 'svc' has no option 'beta'"):
        get_step("svc").resolve_options({"beta": 1})
    with pytest.raises(RecipeError, match="must lie in"):
        get_step("svc").resolve_options({"alpha": 0.0})
