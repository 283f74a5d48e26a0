"""Geometry of figures: lines over layers and heat maps, drawn by the template `charts.html`.

Plot areas are SVG stretched to the page width. Labels are page text next to them, so that they keep their size on any
screen and on paper. Coordinates run from 0 to 1, or count cells.
"""

from __future__ import annotations

import re
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
        wide: width of the area in units of its height.
        hits: a tooltip per unit of width.
    """

    label: str
    axis: Axis
    x_ticks: Ticks
    x_title: str
    paths: Sequence[Drawn]
    names: Sequence[tuple[str, str]]
    wide: int = 1
    hits: Sequence[str] = ()

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


class Line(NamedTuple):
    """One line: class, name and a value per layer."""

    style: str
    name: str
    values: Sequence[float]


def layer_lines(lines: Sequence[Line], columns: Sequence[str], axis: Axis, *, label: str) -> Plot:
    """Lines over layers with a dot at each value."""
    paths = []
    for line in lines:
        points = [(i + 0.5, axis.top(v)) for i, v in enumerate(line.values)]
        along = points[:-1] if columns[-1] == "other" else points  # 'other' is not the next layer
        paths += [Drawn(curve(along), f"line {line.style}"), Drawn(dots(points), f"dot {line.style}")]
    hits = [
        f"{'outside the layers' if column == 'other' else 'layer ' + column}: "
        + ", ".join(f"{line.name} {number(line.values[i])}" for line in lines)
        for i, column in enumerate(columns)
    ]
    names = [(line.style, line.name) for line in lines]
    return Plot(label, axis, layer_ticks(columns), "layer", paths, names, len(columns), hits)


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
        total_title: title of the numbers on the right.
        values: all shown numbers, 0 and above.
    """

    rows: Sequence[Strip]
    columns: Sequence[str]
    total_title: str
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


def kind_of(name: str, part: str = "") -> str:
    """Name of a matrix without its layer: the last two parts of the tensor's name, and the block.

    `model.layers.3.self_attn.q_proj.weight` -> `self_attn.q_proj`; `h.2.attn.c_attn.weight`, q -> `attn.c_attn [q]`.
    """
    words = [w for w in name.removesuffix(".weight").split(".") if not w.isdigit()]
    part = re.sub(r"\d+", "*", part)
    return ".".join(words[-2:]) + (f" [{part}]" if part else "")
