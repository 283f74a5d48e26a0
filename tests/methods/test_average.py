"""The mean against one line of arithmetic, dense and factored."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.spectra import random_deltas, random_lowrank
from tests.tolerances import F64_IDENTITY, relative_error

from actmat.errors import RecipeError
from actmat.methods.average import merge, merge_lowrank


@pytest.mark.parametrize("weights", [None, [0.5, -1.0, 2.5]])
def test_naive_mean(weights: list[float] | None) -> None:
    deltas, share = random_deltas(3, 4, 5), weights or [1.0, 1.0, 1.0]
    expected = (share[0] * deltas[0] + share[1] * deltas[1] + share[2] * deltas[2]) / sum(share)
    assert relative_error(merge(deltas, weights=weights).value, expected) < F64_IDENTITY


def test_weights_that_cancel_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"a sum other than 0, got \[1.0, -1.0\]"):
        merge([torch.ones(2), torch.ones(2)], weights=[1.0, -1.0])
    with pytest.raises(RecipeError, match="a sum other than 0"):
        merge_lowrank(random_lowrank(2, 3, 4, rank=1), weights=[1.0, -1.0])
