"""Positions, colors and text formats of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 1e-150
"""Smallest number shown on an axis; smaller ones are shown as zero."""


def number(value: float | None) -> str:
    """Format with three significant digits; None becomes a dash."""
    if value is None:
        return "–"
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


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
