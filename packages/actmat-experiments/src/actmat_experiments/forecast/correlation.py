"""Rank correlation with an interval that knows that rows hang together.

Rows of one expert of one model share its accuracy, its deltas and its task, whatever was merged: they are a *cluster*,
and clusters, not rows, are drawn again. Resampled rows are weights of the rows that there are, so nothing is sorted
twice: with weights `w`, the mean rank of the values equal to `x` is `sum_{x' < x} w + sum_{x' = x} w / 2` (plus a
constant), and Spearman's coefficient is the weighted correlation of these.

Shapes: `N` rows, `K` clusters, `G` groups.
C. A. Field and A. H. Welsh, "Bootstrapping clustered data", J. R. Statist. Soc. B 69(3), 2007.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["RESAMPLES", "Correlation", "between", "spearman", "within"]

RESAMPLES = 500
"""Draws of clusters: the ends of a 95 % interval are good to a few hundredths of its width."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Correlation:
    """Spearman's coefficient and the 2.5 % and 97.5 % quantiles of it over resampled clusters.

    Args:
        value, low, high: between -1 and 1; 0 where one side does not vary.
        rows, clusters: how many there were.
    """

    value: float
    low: float
    high: float
    rows: int
    clusters: int

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def between(
    x: Sequence[float], y: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0, resamples: int = RESAMPLES
) -> Correlation:
    """Spearman's coefficient over all rows.

    Args:
        x, y: one value each per row.
        clusters: to which cluster each row belongs.
    """
    ranks_x, ranks_y = _Ranks(x), _Ranks(y)
    numbers, count = _numbered(clusters)
    drawn = [_correlation(ranks_x(w), ranks_y(w), w) for w in (d[numbers] for d in _draws(count, seed, resamples))]
    ones = np.ones(len(numbers))
    return _with_interval(_correlation(ranks_x(ones), ranks_y(ones), ones), drawn, len(numbers), count)


def within(
    x: Sequence[float],
    y: Sequence[float],
    groups: Sequence[Hashable],
    clusters: Sequence[Hashable],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Correlation:
    """Mean of Spearman's coefficient over groups of rows, in which `y` varies and which have three rows at least.

    Args:
        x, y: one value each per row.
        groups: rows are compared within their group alone.
        clusters: of the rows; all rows of a group belong to one.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    where, n_groups = _numbered(groups)
    owner, count = _numbered(clusters)
    values, owners, rows = [], [], 0
    for group in range(n_groups):
        inside = np.flatnonzero(where == group)
        if len(inside) < 3 or np.ptp(ys[inside]) == 0:
            continue
        values.append(spearman(xs[inside], ys[inside]))
        owners.append(owner[inside[0]])
        rows += len(inside)
    if not values:
        return Correlation(0.0, 0.0, 0.0, 0, 0)
    found, place = np.array(values), np.array(owners)
    drawn = []
    for draw in _draws(count, seed, resamples):
        weights = draw[place]
        if weights.sum():
            drawn.append(float(weights @ found / weights.sum()))
    return _with_interval(float(found.mean()), drawn, rows, len(set(owners)))


def spearman(x: Any, y: Any) -> float:
    """Spearman's coefficient with mean ranks for equal values; 0 where one side does not vary."""
    ones = np.ones(len(x))
    return _correlation(_Ranks(x)(ones), _Ranks(y)(ones), ones)


class _Ranks:
    """Mean ranks of fixed values under changing weights."""

    def __init__(self, values: Any) -> None:
        _, self._level, counts = np.unique(
            np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True
        )
        self._levels = len(counts)

    def __call__(self, weights: Array) -> Array:
        held = np.bincount(self._level, weights=weights, minlength=self._levels)
        ranks: Array = (np.cumsum(held) - held / 2)[self._level]
        return ranks


def _correlation(x: Array, y: Array, weights: Array) -> float:
    total = weights.sum()
    if not total:
        return 0.0
    dx, dy = x - weights @ x / total, y - weights @ y / total
    scale = float(np.sqrt((weights @ dx**2) * (weights @ dy**2)))
    return float(weights @ (dx * dy)) / scale if scale > 1e-12 * total else 0.0


def _numbered(labels: Sequence[Hashable]) -> tuple[NDArray[np.int64], int]:
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(label, len(known)) for label in labels], dtype=np.int64), len(known)


def _draws(count: int, seed: int, resamples: int) -> NDArray[np.float64]:
    """How often each cluster is drawn, `count` draws with replacement: resamples by clusters."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(count, np.full(count, 1 / count), size=resamples).astype(np.float64)


def _with_interval(value: float, drawn: Sequence[float], rows: int, clusters: int) -> Correlation:
    low, high = np.quantile(np.array(drawn), (0.025, 0.975))
    return Correlation(value, float(low), float(high), rows, clusters)
