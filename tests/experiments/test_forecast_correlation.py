"""Rank correlation against scipy, and its interval against data whose correlation is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from actmat_experiments.forecast.verdict import between, spearman, within


def clustered(generator: np.random.Generator, clusters: int, size: int, rho: float, shared: float) -> tuple:
    """Normal pairs of correlation `rho`; a share `shared` of the variance of both sides is the cluster's."""

    def side() -> tuple[np.ndarray, np.ndarray]:
        return generator.standard_normal((clusters, 1)), generator.standard_normal((clusters, size))

    (cx, ex), (cz, ez) = side(), side()
    x = math.sqrt(shared) * cx + math.sqrt(1 - shared) * ex
    z = math.sqrt(shared) * cz + math.sqrt(1 - shared) * ez
    y = rho * x + math.sqrt(1 - rho**2) * z
    return x.ravel(), y.ravel(), [k for k in range(clusters) for _ in range(size)]


@pytest.mark.parametrize("seed", range(4))
def test_spearman_with_ties_is_scipys(seed: int) -> None:
    generator = np.random.default_rng(seed)
    x, y = generator.integers(0, 6, 40), generator.integers(0, 4, 40)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def test_what_does_not_vary_correlates_with_nothing() -> None:
    assert spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0.0


def test_an_interval_is_that_of_resampled_rows() -> None:
    """The weights of clusters do what copying their rows would do."""
    generator = np.random.default_rng(0)
    x, y, clusters = clustered(generator, 12, 5, 0.5, 0.3)
    numbers = np.array(clusters)
    draws = np.random.default_rng(7).multinomial(12, np.full(12, 1 / 12), size=60)
    copied = []
    for draw in draws:
        rows = np.concatenate([np.flatnonzero(numbers == k) for k in range(12) for _ in range(draw[k])])
        copied.append(stats.spearmanr(x[rows], y[rows]).statistic)
    found = between(x, y, clusters, seed=7, resamples=60)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(copied, (0.025, 0.975))), abs=1e-10)
    assert (found.rows, found.clusters) == (60, 12)


def test_intervals_cover_the_truth_when_rows_hang_together() -> None:
    """With 60 clusters, 19 of 20 intervals hold the truth; drawing rows instead would give intervals far too short."""
    rho, covered, rows_alone = 0.5, 0, 0
    truth = 6 / math.pi * math.asin(rho / 2)
    for seed in range(60):
        x, y, clusters = clustered(np.random.default_rng(seed), 60, 8, rho, 0.8)
        found = between(x, y, clusters, seed=seed, resamples=120)
        covered += found.low <= truth <= found.high
        naive = between(x, y, range(len(x)), seed=seed, resamples=120)
        rows_alone += naive.low <= truth <= naive.high
    assert covered >= 51
    assert rows_alone <= covered - 10


def test_within_groups_differences_between_groups_do_not_count() -> None:
    """Two groups, each of correlation 1, that together go the other way."""
    x, y = [1.0, 2.0, 3.0, 11.0, 12.0, 13.0], [21.0, 22.0, 23.0, 1.0, 2.0, 3.0]
    groups = ["a", "a", "a", "b", "b", "b"]
    assert spearman(x, y) < 0
    found = within(x, y, groups, groups, resamples=20)
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))


def test_within_leaves_out_groups_that_cannot_tell() -> None:
    x, y = [1.0, 2.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0], [1.0, 2.0, 5.0, 5.0, 5.0, 3.0, 2.0, 1.0]
    groups = ["pair", "pair", "flat", "flat", "flat", "whole", "whole", "whole"]
    found = within(x, y, groups, groups, resamples=20)
    assert found.value == pytest.approx(-1.0)
    assert (found.rows, found.clusters) == (3, 1)
    assert within([1.0], [1.0], ["a"], ["a"]).rows == 0


def test_the_same_seed_gives_the_same_interval() -> None:
    x, y, clusters = clustered(np.random.default_rng(3), 10, 4, 0.4, 0.5)
    assert between(x, y, clusters, resamples=50) == between(x, y, clusters, resamples=50)
    assert str(between(x, y, clusters, resamples=50)).startswith("+")
