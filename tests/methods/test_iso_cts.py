"""Iso-CTS against a transcription of the paper's algorithm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.spectra import graded, random_deltas, random_lowrank
from tests.tolerances import relative_error

from actmat.extras.research.iso_cts import merge, split_directions


def naive(deltas, fraction=0.8):
    directions, n_experts = min(deltas[0].shape), len(deltas)
    n_task = round((directions - int(directions * fraction)) / n_experts)
    n_common = directions - n_task * n_experts
    u, s, vh = torch.linalg.svd(sum(d.double() for d in deltas), full_matrices=False)
    common, us, ss, vs = u[:, :n_common], [], [], []
    for delta in deltas:
        rest = delta.double() - common @ common.mT @ delta.double()
        ut, st_, vt = torch.linalg.svd(rest, full_matrices=False)
        us.append(ut[:, :n_task])
        ss.append(st_[:n_task])
        vs.append(vt[:n_task].mT)
    left = torch.cat([*us, common], 1)
    right = torch.cat([*vs, vh[:n_common].mT], 1)
    (pu, _, qu), (pv, _, qv) = (torch.linalg.svd(x, full_matrices=False) for x in (left, right))
    return torch.cat([*ss, s[:n_common]]).mean() * (pu @ qu) @ (pv @ qv).mT


@pytest.mark.parametrize("shape", [(21, 21), (15, 31), (31, 15)])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 5e-5)])
def test_equals_the_paper(shape, fraction, dtype, bound):
    deltas = random_deltas(3, *shape, dtype=dtype)
    assert relative_error(merge(deltas, common_fraction=fraction).value, naive(deltas, fraction)) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 2e-4)])
def test_graded_spectra(dtype, bound):
    deltas = [graded(20, 32, 1e3, seed).to(dtype) for seed in range(4)]
    assert relative_error(merge(deltas).value, naive(deltas)) < bound


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
    deltas = [d.dense().to(dtype) for d in random_lowrank(2, 20, 30, rank=3)]
    merged = merge(deltas)
    level = torch.linalg.svdvals(sum(d.double() for d in deltas)).sum() / 20
    spectrum = torch.zeros(20, dtype=torch.float64)
    spectrum[:6] = level
    assert relative_error(torch.linalg.svdvals(merged.value.double()), spectrum) < 1e-5


def test_more_experts_than_directions_leave_the_common_space():
    deltas = random_deltas(5, 3, 8)
    assert relative_error(merge(deltas).value, naive(deltas)) < 1e-12
    assert merge(deltas).stats["per_expert"] == 0
