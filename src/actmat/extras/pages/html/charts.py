"""Geometry of figures: plots and heat maps, drawn by the template `charts.html`.

Plot areas are SVG stretched to the page width. Labels are page text next to them, so that they keep their size on any
screen and on paper. Coordinates run from 0 to 1, or count cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from actmat.extras.pages.html.scales import Axis, HeatScale, number, spread, tick_indices

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


def layer_ticks(columns: Sequence[str]) -> Ticks:
    """Labels of the layer columns, as many as fit a narrow screen; includes a last column that is not a layer."""
    wide = len(columns)
    ticks = tick_indices(wide, 10)
    if columns[-1] == "other" and wide - 1 not in ticks:
        ticks = [*(i for i in ticks if i < wide - 1 - wide / 10), wide - 1]
    return [((i + 0.5) / wide, columns[i]) for i in ticks]


def curve(points: Iterable[Point]) -> str:
    """SVG path through the points."""
    return "".join(f"{'L' if i else 'M'}{x:.4g} {y:.4f}" for i, (x, y) in enumerate(points))


def dots(points: Iterable[Point]) -> str:
    """SVG path with a dot at each point."""
    return "".join(f"M{x:.4g} {y:.4f}h0" for x, y in points)


class HeatCell(NamedTuple):
    """One cell: color class and tooltip."""

    color: str
    tip: str


class Strip(NamedTuple):
    """One row of cells (None: empty), with its name on the left and `total` on the right."""

    name: str
    cells: Sequence[HeatCell | None]
    total: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Rows over layers, colored by value.

    Args:
        rows, columns: rows of cells, and column labels.
        values: all shown numbers, 0 and above.
    """

    rows: Sequence[Strip]
    columns: Sequence[str]
    values: Sequence[float]

    @property
    def scale(self) -> HeatScale:
        """Color scale of the values."""
        return HeatScale.over(self.values)

    @property
    def alike(self) -> tuple[float, float] | None:
        """Smallest and largest value if all look alike, so that a sentence replaces the colors; else None."""
        return spread(self.values)

    @property
    def ticks(self) -> Ticks:
        """Labels of the columns."""
        return layer_ticks(self.columns)
