"""95 % intervals of shares.

Shapes: `N` test items, `T` tasks, `S` seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Interval", "mean_interval", "over_tasks", "wilson_interval"]

Z_95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A share between 0 and 1 and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half its width."""
        return (self.high - self.low) / 2


def wilson_interval(n_right: float, n: int) -> Interval:
    """95 % interval of a share: `(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)`.

    Unlike the textbook's `p +- z sqrt(p(1-p)/n)` it stays within 0..1 and holds near the ends.
    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927.
    """
    share, z2 = n_right / n, Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(correct_TN: Tensor) -> Interval:
    """Mean over tasks, `m +- z s / sqrt(N)` with `s` the standard deviation, over items, of their mean scores.

    For tasks that are tested on the same items: an item, not an answer, is what was drawn at random.
    """
    score_N = correct_TN.double().mean(0)
    half = Z_95 * float(score_N.std()) / math.sqrt(len(score_N))
    mean = float(score_N.mean())
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half))


def over_tasks(shares_ST: Sequence[Sequence[float]], n_items_T: Sequence[int]) -> Interval:
    """Mean over tasks with test sets of their own, and over seeds: `m +- z sqrt(v_test + v_seed)`.

    `v_test = sum_t p_t (1 - p_t) / n_t / T^2` with `p_t` the mean over seeds, which all answer the same items;
    `v_seed = s^2 / S` with `s` the standard deviation of the seeds' averages, 0 for one seed: then the interval says
    nothing about how another training run would have turned out.
    """
    n_tasks, n_seeds = len(n_items_T), len(shares_ST)
    mean_T = [sum(row[t] for row in shares_ST) / n_seeds for t in range(n_tasks)]
    mean = sum(mean_T) / n_tasks
    v_test = sum(p * (1 - p) / n for p, n in zip(mean_T, n_items_T, strict=True)) / n_tasks**2
    averages = [sum(row) / n_tasks for row in shares_ST]
    v_seed = 0.0 if n_seeds == 1 else sum((a - mean) ** 2 for a in averages) / (n_seeds - 1) / n_seeds
    half = Z_95 * math.sqrt(max(0.0, v_test) + v_seed)
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half))
