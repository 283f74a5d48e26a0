"""Iso-C against its equation, and below full rank against its invariants."""

import pytest
import torch
from tests.helpers.spectra import graded, random_deltas, with_spectrum
from tests.tolerances import relative_error

from actmat.extras.research.iso_c import merge


def naive(deltas):
    u, s, vh = torch.linalg.svd(sum(d.double() for d in deltas), full_matrices=False)
    return s.mean() * u @ vh


@pytest.mark.parametrize("condition", [1e3, 1e6])
@pytest.mark.parametrize("shape", [(20, 50), (30, 30)])
def test_steep_spectra_keep_all_directions(condition, shape):
    delta = graded(*shape, condition)
    assert relative_error(merge([delta]).value, naive([delta])) < 2.0**-50 * condition
    # The float32 result is as good as an exact rule applied to the float32 input.
    single = delta.float()
    assert relative_error(merge([single]).value, naive([single])) < 1e-7 + 2.0**-50 * condition**2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rank_deficient_sum_by_default_flattens_its_range_alone(dtype):
    s = [4.0, 2.0, 1.0, 0.5]
    delta = with_spectrum(10, 20, s, seed=3)
    merged = merge([delta.to(dtype)])
    level = sum(s) / 10
    assert relative_error(merged.value, level * with_spectrum(10, 20, [1.0] * 4, seed=3)) < (
        1e-12 if dtype == torch.float64 else 1e-5
    )
    assert merged.stats == {"directions": 10, "rank_min": 4, "rank_max": 4}


def test_fill_adds_null_directions_of_the_same_level_as_published():
    delta = with_spectrum(10, 20, [4.0, 2.0, 1.0, 0.5], seed=3)
    filled, default = merge([delta], null="fill").value, merge([delta]).value
    assert relative_error(torch.linalg.svdvals(filled), torch.full((10,), 0.75)) < 1e-13
    u, _, vh = torch.linalg.svd(delta)
    assert relative_error(u[:, :4] @ u[:, :4].mT @ filled @ vh[:4].mT @ vh[:4], default) < 1e-12


def test_rank_aware_mean_divides_by_the_rank():
    delta = with_spectrum(10, 20, [4.0, 2.0, 1.0, 0.5], seed=3)
    assert relative_error(merge([delta], mean="rank").value, 2.5 * merge([delta]).value) < 1e-13
    full = random_deltas(2, 6, 9)
    assert relative_error(merge(full, mean="rank").value, merge(full).value) < 1e-15


def test_zeros_stay_exactly_zero_whatever_the_options():
    zeros = [torch.zeros(4, 7)] * 2
    for options in ({}, {"mean": "rank"}, {"null": "fill"}, {"mean": "rank", "null": "fill"}):
        assert not merge(zeros, **options).value.any()
