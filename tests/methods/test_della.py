"""DELLA: the keep probabilities of its ranks, and what follows."""

import math

import pytest
import torch
from tests.helpers.masking import call
from tests.helpers.spectra import random_deltas

from actmat.errors import RecipeError
from actmat.extras.research.della import DELLA

PLAIN = {"sign_election": False}


def test_keep_probabilities_grow_with_rank_within_each_row() -> None:
    draws, density, epsilon = 2000, 0.5, 0.15
    (delta,) = random_deltas(1, 4, 30)
    delta[1] *= 1000  # ranks are taken by row: the scale of a row does not matter
    ranks = delta.abs().argsort(dim=1).argsort(dim=1) / 29
    p = density - epsilon + 2 * epsilon * ranks
    kept = torch.zeros_like(delta)
    for seed in range(draws):
        kept += call(DELLA, [delta], seed=seed, density=density, epsilon=epsilon, **PLAIN) != 0
    z = (kept / draws - p) / (p * (1 - p) / draws).sqrt()
    assert float(z.abs().max()) < 4.5
    assert abs(float(z.mean())) < 4 / math.sqrt(z.numel())
    assert float(z.std()) == pytest.approx(1, abs=4 / math.sqrt(2 * z.numel()))


def test_full_density_is_the_identity_and_none_is_zero() -> None:
    (delta,) = random_deltas(1, 8, 9)
    assert torch.equal(call(DELLA, [delta], density=1.0), delta)
    assert float(call(DELLA, [delta], density=0.0).abs().sum()) == 0


@pytest.mark.parametrize(("density", "epsilon"), [(0.1, 0.15), (0.9, 0.15), (0.5, 0.5)])
def test_probabilities_outside_the_unit_interval_are_refused(density: float, epsilon: float) -> None:
    with pytest.raises(RecipeError, match="must stay inside"):
        call(DELLA, random_deltas(1, 4), density=density, epsilon=epsilon)


def test_experts_may_have_their_own_epsilon() -> None:
    (delta,) = random_deltas(1, 40, 50)
    zero = torch.zeros_like(delta)
    alone = call(DELLA, [delta, zero], density=0.5, epsilon=0.0, **PLAIN)
    listed = call(DELLA, [delta, zero], density=0.5, epsilon=[0.0, 0.4], **PLAIN)
    assert torch.equal(alone, listed)
    assert not torch.equal(alone, call(DELLA, [delta, zero], density=0.5, epsilon=[0.4, 0.0], **PLAIN))
    with pytest.raises(RecipeError, match=r"got density 0\.5 and epsilon 0\.5"):
        call(DELLA, [delta, zero], density=0.5, epsilon=[0.1, 0.5])
