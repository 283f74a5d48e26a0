"""WUDI against its objective: stationary points, and the published Adam steps."""

import pytest
import torch
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.methods import get_method

WUDI = get_method("wudi")

merge = WUDI.merge


def objective(merged, deltas, weights=None):
    share = weights or [1.0] * len(deltas)
    return sum(w * ((merged - d) @ d.T).square().sum() / d.square().sum() for w, d in zip(share, deltas, strict=True))


def small(n_experts, *shape):
    return [1e-3 * d for d in random_deltas(n_experts, *shape)]


def test_closed_form_moves_from_the_sum_only_where_the_objective_is_not_flat():
    deltas = small(3, 4, 20)
    outside = torch.linalg.svd(torch.cat(deltas)).Vh[12:]
    assert relative_error((merge(deltas).value - sum(deltas)) @ outside.T + 1.0, torch.ones(4, 8)) < 1e-12


@pytest.mark.parametrize("steps", [0, 1, 25])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]])
def test_adam_equals_torch_adam_on_the_published_loss(steps, weights):
    deltas = small(3, 6, 8)
    share = weights or [1.0] * 3
    point = sum(w * d for w, d in zip(share, deltas, strict=True)).clone().requires_grad_()
    optimizer = torch.optim.Adam([point], lr=1e-5)
    for _ in range(steps):
        optimizer.zero_grad()
        objective(point, deltas, weights).backward()
        optimizer.step()
    found = merge(deltas, optimizer="adam", steps=steps, weights=weights)
    assert relative_error(found.value, point.detach()) < 1e-9
    assert found.stats["steps"] == steps


def test_adam_leaves_one_expert_exactly_where_it_is():
    """The gradient is zero there; rounding in it, divided by its own size, would be a step of full length."""
    for dtype in (torch.float32, torch.float64):
        deltas = [d.to(dtype) for d in small(1, 9, 7)]
        assert torch.equal(merge(deltas, optimizer="adam").value, deltas[0])


def test_adam_on_a_batch_and_a_zero_delta():
    deltas = [d.reshape(2, 3, 4) for d in small(3, 6, 4)]
    deltas[1][0] = 0.0
    found = merge(deltas, optimizer="adam", steps=10).value
    for item in range(2):
        alone = [d[item] for d in deltas if bool(d[item].any())]
        assert relative_error(found[item], merge(alone, optimizer="adam", steps=10).value) < 1e-12
