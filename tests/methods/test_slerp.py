"""Spherical interpolation against the textbook formula on the weights themselves."""

import math

import pytest
import torch
from tests.helpers.experts import Experts
from tests.tolerances import relative_error
from torch import Tensor

from actmat.extras.research.slerp import merge


def naive(x: Tensor, y: Tensor, t: float) -> Tensor:
    angle = math.acos(float((x * y).sum() / (x.norm() * y.norm())))
    return (math.sin((1 - t) * angle) * x + math.sin(t * angle) * y) / math.sin(angle)


@pytest.fixture
def experts() -> Experts:
    made = Experts.random(2, (6, 7))
    return made.with_deltas([8 * d for d in made.deltas])


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
def test_from_the_base_to_an_expert(experts: Experts, t: float) -> None:
    end = experts.base + experts.deltas[0]
    out = merge(experts.deltas[:1], base=experts.base, t=t).value
    assert float((out - (naive(experts.base, end, t) - experts.base)).norm()) < 1e-12


@pytest.mark.parametrize("t", [0.0, 0.25, 1.0])
def test_from_one_expert_to_another(experts: Experts, t: float) -> None:
    ends = [experts.base + d for d in experts.deltas]
    out = merge(experts.deltas, base=experts.base, t=t).value
    assert relative_error(out, naive(ends[0], ends[1], t) - experts.base) < 1e-12


@pytest.mark.parametrize("delta", [0.5, -2.0, 1e-6])
def test_parallel_and_opposite_ends_are_joined_by_a_line(experts: Experts, delta: float) -> None:
    merged = merge([delta * experts.base], base=experts.base, t=0.25)
    assert merged.stats["linear"] is True
    assert relative_error(merged.value, 0.25 * delta * experts.base) < 1e-14


def test_a_zero_end_has_no_direction(experts: Experts) -> None:
    out = merge(experts.deltas[:1], base=torch.zeros_like(experts.base), t=0.5).value
    assert torch.equal(out, 0.5 * experts.deltas[0])


def test_the_threshold_is_an_option(experts: Experts) -> None:
    assert merge(experts.deltas[:1], base=experts.base, linear_above=0.0).stats["linear"] is True
    assert merge(experts.deltas[:1], base=experts.base, linear_above=1.0).stats["linear"] is False
