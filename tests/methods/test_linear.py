from __future__ import annotations

import pytest
import torch
from tests.helpers.masking import call
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.errors import RecipeError
from actmat.methods.linear import LINEAR


@pytest.mark.parametrize("weights", [None, [0.5, 0.3, 0.4]])
@pytest.mark.parametrize("normalize", [True, False])
def test_equals_the_weighted_sum_of_weights(weights: list[float] | None, normalize: bool) -> None:
    """The rule is defined on weights `W_t`; the delta form must give the same merged weights."""
    base, *deltas = random_deltas(4, 4, 5)
    share = weights or [1.0, 1.0, 1.0]
    summed = sum(w * (base + d) for w, d in zip(share, deltas, strict=True))
    expected = summed / sum(share) if normalize else summed
    found = base + call(LINEAR, deltas, weights=weights, base=base, normalize=normalize)
    assert relative_error(found, expected) < 1e-15


def test_the_mean_needs_no_base() -> None:
    deltas = random_deltas(2, 6)
    assert relative_error(call(LINEAR, deltas), (deltas[0] + deltas[1]) / 2) < 1e-15


def test_unnormalized_without_base_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"needs the base tensor.*scaling=1"):
        call(LINEAR, random_deltas(2, 6), normalize=False)


def test_weights_that_sum_to_zero_are_refused() -> None:
    with pytest.raises(RecipeError, match="sum other than 0"):
        call(LINEAR, random_deltas(2, 6), weights=[1.0, -1.0])


def test_weights_that_sum_to_zero_are_a_difference_when_not_normalized() -> None:
    base, first, second = random_deltas(3, 6)
    found = base + call(LINEAR, [first, second], weights=[1.0, -1.0], base=base, normalize=False)
    assert relative_error(found, first - second) < 1e-14
    assert torch.isfinite(found).all()
