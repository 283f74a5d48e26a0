"""DARE: the law of its masks, and the rules that follow them."""

import math
from typing import Any

import pytest
import torch
from tests.helpers.masking import call
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error
from torch import Tensor

from actmat.errors import RecipeError
from actmat.extras.research.dare import DARE


def masked(deltas: list[Tensor], t: int, **given: Any) -> Tensor:
    """The masked delta of expert t: the sum with all other weights zero."""
    weights = [float(i == t) for i in range(len(deltas))]
    return call(DARE, deltas, weights=weights, rule="linear", **given)


def test_masks_of_experts_and_seeds_are_independent() -> None:
    n = 40_000
    deltas = [torch.ones(n), torch.ones(n)]
    first, second = (masked(deltas, t, density=0.5) != 0 for t in range(2))
    other = masked(deltas, 0, density=0.5, seed=1) != 0
    for pair in (first & second, first & other):
        assert abs(int(pair.sum()) - n / 4) < 5 * math.sqrt(n * 3 / 16)


@pytest.mark.parametrize("rescale", ["inverse", "l1", "none"])
def test_nothing_dropped_is_the_identity(rescale: str) -> None:
    (delta,) = random_deltas(1, 100)
    assert torch.equal(call(DARE, [delta], density=1.0, rescale=rescale, rule="linear"), delta)
    assert float(call(DARE, [delta], density=0.0, rescale=rescale, rule="linear").abs().sum()) == 0


def test_the_default_is_scaled_like_task_arithmetic() -> None:
    deltas = random_deltas(2, 40)
    assert relative_error(call(DARE, deltas, density=1.0), 0.4 * (deltas[0] + deltas[1])) < 1e-15


def test_density_per_expert() -> None:
    deltas = random_deltas(2, 400)
    assert torch.equal(masked(deltas, 0, density=[1.0, 0.0]), deltas[0])
    assert float(masked(deltas, 1, density=[1.0, 0.0]).abs().sum()) == 0


def test_an_average_needs_weights_with_a_sum() -> None:
    with pytest.raises(RecipeError, match="sum other than 0"):
        call(DARE, random_deltas(2, 4), rule="average", weights=[1.0, -1.0])
