import pytest
import torch
from tests.helpers.masking import call
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.errors import RecipeError
from actmat.methods.linear import LINEAR


def test_weights_that_sum_to_zero_are_refused() -> None:
    with pytest.raises(RecipeError, match="sum other than 0"):
        call(LINEAR, random_deltas(2, 6), weights=[1.0, -1.0])


def test_weights_that_sum_to_zero_are_a_difference_when_not_normalized() -> None:
    base, first, second = random_deltas(3, 6)
    found = base + call(LINEAR, [first, second], weights=[1.0, -1.0], base=base, normalize=False)
    assert relative_error(found, first - second) < 1e-14
    assert torch.isfinite(found).all()
