"""Iso-CTS against a transcription of the paper's algorithm."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.spectra import random_deltas, random_lowrank
from tests.tolerances import relative_error

from actmat.extras.research.iso_c import merge as iso_c
from actmat.extras.research.iso_cts import merge, split_directions


@given(st.integers(1, 200), st.integers(1, 40), st.floats(0, 1))
def test_the_split_always_uses_all_directions(directions, n_experts, fraction):
    n_common, n_task = split_directions(directions, n_experts, fraction)
    assert n_common >= 0
    assert n_task >= 0
    assert n_common + n_task * n_experts == directions


def test_known_splits():
    assert split_directions(768, 8, 0.8) == (616, 19)
    assert split_directions(24, 4, 0.8) == (20, 1)
    assert split_directions(3, 4, 0.8) == (3, 0)
    assert split_directions(3, 2, 0.0) == (1, 1)  # round(1.5) = 2 would need four of three directions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residuals_that_are_rounding_contribute_nothing(dtype):
    # The common space holds the whole sum's range, so every task residual is zero up to rounding.
    deltas = [d.dense().to(dtype) for d in random_lowrank([3, 3], 20, 30)]
    merged = merge(deltas)
    level = torch.linalg.svdvals(sum(d.double() for d in deltas)).sum() / 20
    spectrum = torch.zeros(20, dtype=torch.float64)
    spectrum[:6] = level
    assert relative_error(torch.linalg.svdvals(merged.value.double()), spectrum) < 1e-5


def test_more_experts_than_directions_leave_the_common_space():
    deltas = random_deltas(5, 3, 8)
    assert relative_error(merge(deltas).value, iso_c(deltas, null="fill").value) < 1e-12
    assert merge(deltas).stats["per_expert"] == 0
