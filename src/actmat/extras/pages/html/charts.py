"""Geometry of plots, drawn by the template `charts.html`.

Plot areas are SVG stretched to the page width. Labels are page text next to them, so that they keep their size on any
screen and on paper. Coordinates run from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from actmat.extras.pages.html.scales import Axis, number

Point = tuple[float, float]
Ticks = Sequence[tuple[float, str]]
"""Labels of an axis: position from 0 to 1, and text."""


class Drawn(NamedTuple):
    """A path: SVG description, classes and tooltip."""

    d: str
    style: str
    tip: str | None = None


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot area with its axes.

    Args:
        label: text for screen readers.
        axis: vertical axis.
        x_ticks, x_title: labels of the horizontal axis.
        paths: paths in drawing order.
        names: class and name of each line, for the legend.
    """

    label: str
    axis: Axis
    x_ticks: Ticks
    x_title: str
    paths: Sequence[Drawn]
    names: Sequence[tuple[str, str]]

    @property
    def y_ticks(self) -> Ticks:
        """Labels of the vertical axis."""
        return [(self.axis.position(t), number(t)) for t in self.axis.ticks]


def curve(points: Iterable[Point]) -> str:
    """SVG path through the points."""
    return "".join(f"{'L' if i else 'M'}{x:.4g} {y:.4f}" for i, (x, y) in enumerate(points))


def dots(points: Iterable[Point]) -> str:
    """SVG path with a dot at each point."""
    return "".join(f"M{x:.4g} {y:.4f}h0" for x, y in points)
