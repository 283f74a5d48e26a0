"""Model Stock against a loop over pairs and filters, in the weights themselves."""

import itertools

import pytest
import torch
from tests.helpers.experts import Experts
from tests.tolerances import relative_error
from torch import Tensor

from actmat.extras.research.model_stock import merge


def naive(base: Tensor, experts: list[Tensor]) -> Tensor:
    """Equations 2 and 4 of the paper on one vector: `w = t mean(w_i) + (1 - t) w_0`."""
    pairs = itertools.combinations([w - base for w in experts], 2)
    cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in pairs]
    cosine, count = sum(cosines) / len(cosines), len(experts)
    t = count * cosine / ((count - 1) * cosine + 1)
    return t * sum(experts[1:], experts[0]) / count + (1 - t) * base - base


@pytest.mark.parametrize("shape", [(6, 7), (2, 3, 5), (5000, 9), (3, 20000)])
def test_one_angle_per_filter(shape: tuple[int, ...]) -> None:
    experts = correlated(3, shape)
    out = merge(experts.deltas, filter_wise=True).value.reshape(-1, shape[-1])
    base = experts.base.reshape(-1, shape[-1])
    rows = [d.reshape(-1, shape[-1]) for d in experts.deltas]
    for i in (0, 1, out.shape[0] - 1):
        assert relative_error(out[i], naive(base[i], [base[i] + d[i] for d in rows])) < 1e-11


def test_a_vector_is_one_filter() -> None:
    experts = correlated(3, (40,))
    assert torch.equal(merge(experts.deltas, filter_wise=True).value, merge(experts.deltas).value)


def test_orthogonal_experts_keep_the_base_and_opposed_ones_do_not_blow_up() -> None:
    one, two = torch.eye(4, dtype=torch.float64)[:2]
    assert torch.equal(merge([one, two]).value, torch.zeros(4, dtype=torch.float64))
    opposed = merge([one, -one])
    assert torch.equal(opposed.value, torch.zeros(4, dtype=torch.float64))
    assert opposed.stats["cosine"] == -1.0
    thirds = [torch.tensor([1.0, 0.0]), torch.tensor([-0.5, 0.75**0.5]), torch.tensor([-0.5, -(0.75**0.5)])]
    assert bool(merge(thirds).value.isfinite().all())


def test_a_frozen_filter_stays() -> None:
    deltas = [d.clone() for d in correlated(3, (6, 7)).deltas]
    for d in deltas:
        d[2] = 0
    out = merge(deltas, filter_wise=True).value
    assert torch.equal(out[2], torch.zeros(7, dtype=torch.float64))
    assert bool(out.isfinite().all())


def correlated(n_experts: int, shape: tuple[int, ...]) -> Experts:
    """Experts that share a direction, so that the angle is away from 90 degrees."""
    experts = Experts.random(n_experts, shape, statistics=False)
    common = Experts.random(1, shape, seed=9, statistics=False).deltas[0]
    return experts.with_deltas([d + common for d in experts.deltas])
