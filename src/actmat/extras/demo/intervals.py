"""95 % intervals of shares.

Shapes: `N` test items, `T` tasks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Z_95", "Interval", "mean_interval", "wilson_interval"]

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
