"""Positions, colors and texts of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST = 1e-150
"""Smallest number that an axis shows; smaller ones are zero for every reader."""


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits; a dash for None."""
    if value is None:
        return "–"
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    """`12 %`; one digit more below ten."""
    if share is None:
        return "–"
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %" if value >= 0.1 else "< 0.1 %"


def residual_text(value: float | None) -> str:
    """Two decimals; more would not be significant in a residual."""
    if value is None:
        return "–"
    return "< 0.01" if 0 < value < 0.005 else f"{value:.2f}"


def residual_level(value: float | None) -> str:
    """Class of a residual: tenths from 0 to 1, then two levels of 'further away than the base'."""
    if value is None:
        return "none"
    if value >= 1:
        return "h1" if value >= 1.25 else "h0"
    return f"q{min(9, int(10 * max(value, 0.0)))}"


ALIKE = 0.1
"""Numbers on a scale from 0 to 1 that differ by less look the same in any color: a sentence says as much."""


@dataclass(frozen=True, slots=True)
class HeatScale:
    """Colors for numbers between `low` and `high` in ten levels, and two levels for 1 and more.

    >>> HeatScale.over([0.52, 0.71, 1.4])
    HeatScale(low=0.5, high=0.8)
    """

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float]) -> HeatScale:
        """From the tenth below the smallest to the tenth above the largest number that is less than 1."""
        below = [v for v in values if v < 1]
        if not below:
            return cls(0.0, 1.0)
        low, high = math.floor(10 * min(below)) / 10, math.floor(10 * max(below) + 1) / 10
        return cls(max(0.0, low), min(1.0, high))

    def level(self, value: float | None) -> str:
        """Color class of a number."""
        if value is None or value >= 1:
            return residual_level(value)
        return f"q{max(0, min(9, int(10 * (value - self.low) / (self.high - self.low))))}"


def spread(values: Iterable[float]) -> tuple[float, float] | None:
    """The smallest and the largest of numbers that are all alike; None where they are not, or where there are none."""
    found = list(values)
    if not found or max(found) - min(found) >= ALIKE:
        return None
    return min(found), max(found)


def diverging(value: float) -> str:
    """Class of a cosine: five levels of each sign, finer near zero."""
    level = sum(abs(value) >= bound for bound in (0.05, 0.15, 0.3, 0.5))
    return f"{'p' if value >= 0 else 'm'}{level}"


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from `low` to `high`, and the numbers with a label."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def position(self, value: float) -> float:
        """Position of a value: 0 at the low end, 1 at the high end; values outside are moved to the end."""
        return min(1.0, (max(value, self.low) - self.low) / (self.high - self.low))

    def top(self, value: float) -> float:
        """Distance of a value from the high end of an upward axis, as SVG counts."""
        return 1 - self.position(value)


def positive_axis(values: Sequence[float]) -> Axis:
    """From zero to a round number above the largest, with about four steps."""
    top = max([v for v in values if v > LEAST], default=1.0)
    step = _round_step(top)
    count = math.ceil(top / step - 1e-9)
    return Axis(0.0, count * step, tuple(i * step for i in range(count + 1)))


def range_axis(values: Sequence[float]) -> Axis:
    """From a round number at or below the smallest value to one at or above the largest, in about four steps."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high), LEAST):
        high, low = low + (abs(low) or 1.0) / 2, low - (abs(low) or 1.0) / 2
    step = _round_step(high - low)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, last * step, tuple(k * step for k in range(first, last + 1)))


def _round_step(length: float) -> float:
    """A quarter of a length, rounded up."""
    decade = 10.0 ** math.floor(math.log10(length / 4))
    return next(s for s in (decade * f for f in (1, 2, 2.5, 5, 10, 20)) if s * 4 >= length * 0.999)


def tick_indices(count: int, wanted: int = 8) -> list[int]:
    """Indices, of `count` along an axis, that get a label: the first, then in even round steps."""
    if count <= wanted:
        return list(range(count))
    step = next(s for s in (2, 4, 5, 8, 10, 16, 20, 25, 50, 100, 200, 500, 1000, count) if count / s <= wanted)
    return list(range(0, count, step))
