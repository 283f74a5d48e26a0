"""Correlations of products of inputs with the size of gradients: against loops, and against chance."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from tests.helpers.analyses import gaussian

from actmat_experiments.analyses.correlation import entry_correlations, null_rms, permuted_rms, rms_correlation


def test_equal_to_a_loop_over_pairs():
    z, size = gaussian(30, 4), gaussian(30, seed=1).square()
    found = entry_correlations(z, size)
    for i, j in itertools.product(range(4), repeat=2):
        products = [float(row[i] * row[j]) for row in z]
        assert float(found[i, j]) == pytest.approx(statistics.correlation(products, size.tolist()), abs=1e-12)


def test_perfect_and_undefined_correlations():
    z = torch.stack([gaussian(20), torch.ones(20).double()], dim=1)
    found = entry_correlations(z, z[:, 0].square())
    assert float(found[0, 0]) == pytest.approx(1)
    assert math.isnan(float(found[1, 1]))  # constant over tokens
    assert not math.isnan(float(found[0, 1]))
    assert entry_correlations(z, torch.ones(20)).isnan().all()
    assert math.isnan(rms_correlation(entry_correlations(z, torch.ones(20))))


def test_the_mean_square_counts_every_pair_once():
    found = torch.tensor([[0.6, 0.0], [0.0, math.nan]])
    assert rms_correlation(found) == pytest.approx(math.sqrt((0.36 + 0) / 2))


@pytest.mark.parametrize("heavy", [False, True])
def test_chance_is_exact_over_all_orders(heavy):
    """Also for numbers as uneven as gradients' sizes are: the mean over all 6! orders is 1 / (N - 1)."""
    z, size = gaussian(6, 2), gaussian(6, seed=1).square()
    size = size**4 if heavy else size
    squares = [float(entry_correlations(z, size[list(order)])[0, 1]) ** 2 for order in itertools.permutations(range(6))]
    assert statistics.fmean(squares) == pytest.approx(null_rms(6) ** 2, rel=1e-10)


def test_permutations_of_samples_see_that_tokens_of_a_sample_are_alike():
    """50 samples of 20 equal tokens are 50 observations, not 1000."""
    z = gaussian(50, 6).repeat_interleave(20, 0)
    size = gaussian(50, seed=1).square().repeat_interleave(20)
    generator = torch.Generator().manual_seed(2)
    places = torch.arange(1000).view(50, 20)
    whole = permuted_rms(z, size, [places[torch.randperm(50, generator=generator)].flatten() for _ in range(30)])
    single = permuted_rms(z, size, [torch.randperm(1000, generator=generator) for _ in range(30)])
    assert statistics.fmean(whole) == pytest.approx(null_rms(50), rel=0.25)
    assert statistics.fmean(single) == pytest.approx(null_rms(1000), rel=0.25)


def test_too_few_tokens():
    with pytest.raises(ValueError, match="two or more"):
        entry_correlations(gaussian(1, 3), gaussian(1))
    with pytest.raises(ValueError, match="got 4 and 5"):
        entry_correlations(gaussian(4, 3), gaussian(5))
