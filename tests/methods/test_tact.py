from __future__ import annotations

import pytest
import torch
from tests.helpers.interference import naive, self_grams
from tests.helpers.spectra import random_deltas
from tests.tolerances import relative_error

from actmat.methods import get_method
from actmat.methods.actmat import ACTMAT

TACT = get_method("tact")

merge_actmat = ACTMAT.merge
merge = TACT.merge


def top(delta, fraction):
    """The largest entries by sorting all of them."""
    order = delta.abs().flatten().argsort(descending=True)
    kept = torch.zeros_like(delta).flatten()
    kept[order[: round(fraction * order.numel())]] = 1.0
    return delta * kept.view_as(delta)


@pytest.mark.parametrize("shape", [(4, 12, 12), (3, 20, 8), (3, 10, 16), (2, 4, 20)])
@pytest.mark.parametrize("trim", [0.2, 0.5, 0.9])
def test_equation(shape, trim):
    deltas = random_deltas(*shape)
    expected = naive(deltas, self_grams([top(d, trim) for d in deltas]))
    assert relative_error(merge(deltas, trim=trim).value, expected) < 1e-9


def test_keeps_the_whole_delta_as_target():
    """One expert with all columns in its trimmed part comes back whole, small entries included."""
    delta = random_deltas(1, 30, 5)
    assert relative_error(merge(delta).value, delta[0]) < 1e-12


def test_without_trimming_is_actmat():
    deltas = random_deltas(3, 8, 8)
    assert relative_error(merge(deltas, trim=1.0).value, merge_actmat(deltas).value) < 1e-12
    assert relative_error(merge(deltas, trim=0.3).value, merge_actmat(deltas).value) > 1e-2


def test_has_no_low_rank_form():
    assert TACT.lowrank is None
