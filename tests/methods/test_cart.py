"""CART against a transcription of its equation, and its limits."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.spectra import graded, random_deltas
from tests.tolerances import F32_ELEMENTWISE, relative_error

from actmat.extras.research.cart import kept_directions, merge


def naive(deltas, k, scaling):
    """Full SVDs in float64, triplet by triplet."""
    deltas = [d.double() for d in deltas]
    mean = sum(deltas) / len(deltas)
    out = mean.clone()
    for delta in deltas:
        u, s, vh = torch.linalg.svd(delta - mean, full_matrices=False)
        for i in range(min(k, len(s))):
            out += scaling * s[i] * torch.outer(u[:, i], vh[i])
    return out


@pytest.mark.parametrize("shape", [(16, 16), (12, 30), (30, 12)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize(("rank", "scaling", "k"), [(0.08, 1.0, 1), (0.25, 0.3, None), (1.0, 2.0, 99)])
def test_equals_the_equation(shape, dtype, bound, rank, scaling, k):
    deltas = random_deltas(3, *shape, dtype=dtype)
    k = int(0.25 * min(shape)) if k is None else k
    found = merge(deltas, rank=rank, scaling=scaling)
    assert found.value.dtype == dtype
    assert relative_error(found.value, naive(deltas, k, scaling)) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_steep_spectra(dtype, bound):
    deltas = [graded(20, 32, 1e5, seed).to(dtype) for seed in range(4)]
    assert relative_error(merge(deltas, rank=0.3).value, naive(deltas, 6, 1.0)) < bound


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
    deltas = random_deltas(3, 24, 24)
    assert relative_error(merge(deltas, rank=0.16, rounding="up").value, naive(deltas, 4, 1.0)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences_that_are_rounding_contribute_nothing(dtype):
    delta = random_deltas(1, 14, 10, dtype=dtype)[0] / 3
    found = merge([delta] * 3, scaling=1e6)
    assert found.stats["rank_max"] == 0
    assert relative_error(found.value, delta) < F32_ELEMENTWISE
