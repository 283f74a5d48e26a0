"""CART against a transcription of its equation, and its limits."""

import pytest
import torch
from tests.helpers.spectra import random_deltas
from tests.tolerances import F32_ELEMENTWISE, relative_error

from actmat.extras.research.cart import kept_directions, merge


def test_none_and_all_of_the_directions_are_the_average():
    deltas = random_deltas(4, 12, 9)
    mean = sum(deltas) / 4
    assert relative_error(merge(deltas, scaling=0).value, mean) < 1e-13
    assert relative_error(merge(deltas, rank=1.0).value, mean) < 1e-12
    assert merge(deltas, rank=0.0, rounding="up").stats["k"] == 0
    assert relative_error(merge(deltas, rank=0.0, rounding="up").value, mean) < 1e-13


def test_rounding_of_the_rank():
    assert kept_directions((24, 24), 0.16, "down") == 3
    assert kept_directions((24, 24), 0.16, "up") == 4
    assert kept_directions((5, 24), 0.16, "down") == 1
    assert kept_directions((5, 24), 0.16, "up") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences_that_are_rounding_contribute_nothing(dtype):
    delta = random_deltas(1, 14, 10, dtype=dtype)[0] / 3
    found = merge([delta] * 3, scaling=1e6)
    assert found.stats["rank_max"] == 0
    assert relative_error(found.value, delta) < F32_ELEMENTWISE
