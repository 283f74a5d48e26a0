"""Positions, colors and text formats of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST = 1e-150
"""Smallest number shown on an axis; smaller ones are shown as zero."""


def number(value: float | None, digits: int = 3) -> str:
    """Format with three significant digits; None becomes a dash."""
    if value is None:
        return "–"
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    """Format as `12 %`, with one more digit below ten."""
    if share is None:
        return "–"
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %" if value >= 0.1 else "< 0.1 %"


def residual_text(value: float | None) -> str:
    """Format with two decimals, which is the significance of a residual."""
    if value is None:
        return "–"
    return "< 0.01" if 0 < value < 0.005 else f"{value:.2f}"


def residual_level(value: float | None) -> str:
    """Color class of a residual: tenths from 0 to 1, then two levels for values above 1."""
    if value is None:
        return "none"
    if value >= 1:
        return "h1" if value >= 1.25 else "h0"
    return f"q{min(9, int(10 * max(value, 0.0)))}"


ALIKE = 0.1
"""Smallest difference, on a scale from 0 to 1, that colors can show."""


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
        """Scale from the tenth below the smallest to the tenth above the largest value below 1."""
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
    """Smallest and largest value if all are alike, else None; None also for no values."""
    numbers = list(values)
    if not numbers or max(numbers) - min(numbers) >= ALIKE:
        return None
    return min(numbers), max(numbers)


def diverging(value: float) -> str:
    """Color class of a cosine: five levels per sign, finer near zero."""
    level = sum(abs(value) >= bound for bound in (0.05, 0.15, 0.3, 0.5))
    return f"{'p' if value >= 0 else 'm'}{level}"


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from `low` to `high` with labeled numbers."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def position(self, value: float) -> float:
        """Position of a value: 0 at the low end, 1 at the high end; values outside are clipped."""
        return min(1.0, (max(value, self.low) - self.low) / (self.high - self.low))

    def top(self, value: float) -> float:
        """Distance of a value from the top of a vertical axis, as in SVG coordinates."""
        return 1 - self.position(value)


def range_axis(values: Sequence[float]) -> Axis:
    """Axis between round numbers around all values, with about four steps."""
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
    """Indices of labels among `count` positions: the first, then in even round steps."""
    if count <= wanted:
        return list(range(count))
    step = next(s for s in (2, 4, 5, 8, 10, 16, 20, 25, 50, 100, 200, 500, 1000, count) if count / s <= wanted)
    return list(range(0, count, step))
