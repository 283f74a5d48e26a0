"""The Karcher mean against an iteration on the tensors themselves, and against what defines it."""

import math

import pytest
import torch
from tests.helpers.experts import Experts
from tests.tolerances import F64_ORACLE, relative_error
from torch import Tensor

from actmat.extras.research.karcher import merge, sphere_mean


def naive(weights: list[Tensor], alphas: list[float], max_iter: int, tol: float) -> Tensor:
    """The fixed-point iteration on whole tensors, log and exp maps written out."""
    norms = [float(w.norm()) for w in weights]
    units = [w / n for w, n in zip(weights, norms, strict=True)]
    mean = sum((a * u for a, u in zip(alphas, units, strict=True)), torch.zeros_like(units[0]))
    mean = mean / mean.norm()
    for _ in range(max_iter):
        step = torch.zeros_like(mean)
        for alpha, unit in zip(alphas, units, strict=True):
            dot = max(-1.0, min(1.0, float((mean * unit).sum())))
            if math.acos(dot) >= tol:
                step += alpha * math.acos(dot) / math.sin(math.acos(dot)) * (unit - dot * mean)
        length = float(step.norm())
        if length < tol:
            break
        mean = math.cos(length) * mean + math.sin(length) * step / length
        mean = mean / mean.norm()
    return sum(a * n for a, n in zip(alphas, norms, strict=True)) * mean


@pytest.mark.parametrize("size", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("max_iter", [1, 10])
def test_iterating_on_coefficients_is_iterating_on_tensors(size: float, max_iter: int) -> None:
    made = Experts.random(3, (6, 7))
    experts = made.with_deltas([10 * size * d for d in made.deltas])
    weights = [experts.base + d for d in experts.deltas]
    out = merge(experts.deltas, base=experts.base, max_iter=max_iter)
    assert relative_error(out.value, naive(weights, [1 / 3] * 3, max_iter, 1e-5) - experts.base) < 1e-10
    assert out.stats["iterations"] <= max_iter


def test_weights_and_the_base_as_a_point() -> None:
    experts = Experts.random(2, (6, 7))
    points = [experts.base, *(experts.base + d for d in experts.deltas)]
    out = merge(experts.deltas, base=experts.base, weights=[1.0, 3.0], include_base=True).value
    assert relative_error(out, naive(points, [2 / 6, 1 / 6, 3 / 6], 10, 1e-5) - experts.base) < 1e-9


def test_opposite_points_start_from_the_first() -> None:
    mean, _ = sphere_mean(
        torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double(), torch.tensor([0.5, 0.5]).double(), 10, 1e-5
    )
    assert bool(mean.isfinite().all())


def test_experts_without_a_direction_are_left_out_of_it_but_not_of_the_norm() -> None:
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    out = merge([x, torch.zeros(2).double()], base=torch.zeros(2).double()).value
    assert torch.allclose(out, x / 2, atol=1e-15)
    assert torch.equal(merge([-x, -x], base=x).value, -x)


def test_weights_must_have_a_positive_sum() -> None:
    with pytest.raises(ValueError, match="positive sum"):
        merge([torch.ones(2), torch.ones(2)], base=torch.ones(2), weights=[1.0, -1.0])


def test_no_step_is_the_direction_of_the_mean_of_the_unit_vectors() -> None:
    experts = Experts.random(3, (6, 5))
    share = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    units = [d / d.norm() for d in experts.deltas]
    pole = sum(w * u for w, u in zip(share, units, strict=True))
    expected = pole / pole.norm() * sum(w * d.norm() for w, d in zip(share, experts.deltas, strict=True))
    found = merge(experts.deltas, weights=[5.0, 2.0, 3.0], max_iter=0, of="deltas")
    assert relative_error(found.value, expected) <= F64_ORACLE
    with pytest.raises(ValueError, match="include_base needs of="):
        merge(experts.deltas, of="deltas", include_base=True)


def test_of_deltas_is_of_weights_from_a_zero_base() -> None:
    experts = Experts.random(3, (6, 5))
    expected = merge(experts.deltas, base=torch.zeros(6, 5, dtype=torch.float64))
    assert relative_error(merge(experts.deltas, of="deltas").value, expected.value) <= F64_ORACLE
