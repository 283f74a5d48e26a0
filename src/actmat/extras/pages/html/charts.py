"""Geometry of figures: lines over layers, spectra, heat maps; the templates `charts.html` draw them.

Plot areas are SVG stretched to the width of the page; labels are text of the page next to them, so that they keep their
size on any screen and on paper. Coordinates inside run from 0 to 1, or count cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from actmat.diagnostics.model import Spectrum
from actmat.extras.pages.html.scales import EXPERT_COLOURS, Axis, HeatScale, number, spread, tick_indices

Point = tuple[float, float]
Ticks = Sequence[tuple[float, str]]
"""Labels of an axis: position from 0 to 1, text."""

MOST_ENDS = 8
"""Lines that are labelled at their ends; more than that would not fit below each other."""
LONGEST_END = 16
"""Characters of such a label."""
LINE_HEIGHT = 15
"""Pixels from one label at the end of a line to the next."""
AREA_HEIGHT, PANEL_HEIGHT = 200, 130
"""Pixels of plot areas, the smaller ones of narrow screens, and of panels; as in style.css."""


class Drawn(NamedTuple):
    """A path: its SVG description, its classes and its tool tip."""

    d: str
    style: str
    tip: str | None = None


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot area with its axes.

    Args:
        label: for screen readers.
        axis, y_text: upward axis, and the texts of its ticks.
        x_ticks, x_title: labels below.
        paths: drawn in this order.
        wide: the width of the area in its own units; its height is 1.
        hits: a tool tip per unit of width.
        floor: the area below it is shaded.
        names: class and name of each line, for a legend; (class, name, position) of `ends` where they fit there.
    """

    label: str
    axis: Axis
    y_text: Sequence[str]
    x_ticks: Ticks
    x_title: str
    paths: Sequence[Drawn]
    wide: int = 1
    hits: Sequence[str] = ()
    floor: float | None = None
    names: Sequence[tuple[str, str]] = ()
    ends: Sequence[tuple[str, str, float]] = ()

    @property
    def y_ticks(self) -> Ticks:
        """Labels of the upward axis."""
        return [(self.axis.position(t), text) for t, text in zip(self.axis.ticks, self.y_text, strict=True)]

    @property
    def end_width(self) -> float:
        """Width of the labels at the ends, in ems."""
        return 3 + 0.65 * max((len(name) for _, name, _ in self.ends), default=0)


def end_labels(entries: Sequence[tuple[str, str, float]], *, height: int) -> list[tuple[str, str, float]]:
    """Names of lines at their right ends: (class, name, height from 0 to 1), moved apart; none if they would not fit.

    Args:
        entries: one per line.
        height: of the plot area, in pixels.
    """
    if not entries or len(entries) > MOST_ENDS or max(len(n) for _, n, _ in entries) > LONGEST_END:
        return []
    gap = LINE_HEIGHT / height
    places: list[float] = []
    ordered = sorted(entries, key=lambda e: e[2])
    for _, _, wanted in ordered:
        places.append(max(wanted, places[-1] + gap) if places else wanted)
    limit = 1.0
    for i in reversed(range(len(places)) if places[-1] > 1 else ()):  # from the top down again, each as far as it must
        places[i] = min(places[i], limit)
        limit = places[i] - gap
    return [(style, name, place) for (style, name, _), place in zip(ordered, places, strict=True)]


def layer_ticks(columns: Sequence[str]) -> Ticks:
    """Labels below one column per layer, as many as fit a narrow screen, always with the last if it is no layer."""
    wide = len(columns)
    ticks = tick_indices(wide, 10)
    if columns[-1] == "other" and wide - 1 not in ticks:
        ticks = [*(i for i in ticks if i < wide - 1 - wide / 10), wide - 1]
    return [((i + 0.5) / wide, columns[i]) for i in ticks]


def expert_class(expert: int) -> str:
    """Colour and dash of an expert's line."""
    dashes = ("", " dash", " dots")
    return f"e{expert % EXPERT_COLOURS}{dashes[min(expert // EXPERT_COLOURS, 2)]}"


class Line(NamedTuple):
    """One line: its class, name and a value per layer (None leaves a gap)."""

    style: str
    name: str
    values: Sequence[float | None]


def layer_lines(
    lines: Sequence[Line], columns: Sequence[str], axis: Axis, *, label: str, floor: float | None = None
) -> Plot:
    """Lines over layers with a dot at each value; the area below `floor`, if given, is shaded."""
    paths = []
    for line in lines:
        points = [None if v is None else (i + 0.5, axis.top(v)) for i, v in enumerate(line.values)]
        along = points[:-1] if columns[-1] == "other" else points  # matrices outside the layers are no next layer
        paths += [Drawn(curve(along), f"line {line.style}"), Drawn(dots(points), f"dot {line.style}")]
    hits = []
    for i, column in enumerate(columns):
        said = [f"{line.name} {number(line.values[i])}" for line in lines if line.values[i] is not None]
        hits.append(f"{'outside the layers' if column == 'other' else 'layer ' + column}: " + ", ".join(said))
    inside = -1 if columns[-1] == "other" and len(columns) > 1 else len(columns)
    lasts = [(line, _last(line.values[:inside]) or _last(line.values)) for line in lines]
    ends = [(line.style, line.name, axis.position(v)) for line, v in lasts if v is not None]
    names, labels = [(line.style, line.name) for line in lines], end_labels(ends, height=AREA_HEIGHT)
    texts, ticks = [number(t) for t in axis.ticks], layer_ticks(columns)
    return Plot(label, axis, texts, ticks, "layer", paths, len(columns), hits, floor, names, labels)


def _last(values: Sequence[float | None]) -> float | None:
    return next((v for v in reversed(values) if v is not None), None)


def curve(points: Sequence[Point | None]) -> str:
    """SVG path through the points, interrupted at each None."""
    out, down = [], False
    for point in points:
        if point is not None:
            out.append(f"{'L' if down else 'M'}{point[0]:.4g} {point[1]:.4f}")
        down = point is not None
    return "".join(out)


def dots(points: Iterable[Point | None]) -> str:
    """SVG path with a dot at each point."""
    return "".join(f"M{p[0]:.4g} {p[1]:.4f}h0" for p in points if p is not None)


class Curve(NamedTuple):
    """A spectrum to draw: its class, name, and the rank that the method kept."""

    style: str
    name: str
    spectrum: Spectrum
    kept: int | None


def scree(curves: Sequence[Curve], *, label: str) -> Plot:
    """Falling eigenvalues: share of the directions (right) against size relative to the largest (down, log10).

    Where few directions carry anything, as in merges of adapters, the axis ends with the last of them. A dot marks
    where the method stopped.
    """
    low = min((c.spectrum.edges[0] for c in curves), default=-12.0)
    step = 2.0 if low >= -8 else 3.0
    axis = Axis(low, 0.0, tuple(-step * k for k in range(int(-low / step) + 1)))
    end = _last_share([c.spectrum for c in curves])
    paths, ends = [], []
    for style, name, spectrum, kept in curves:
        fall, total = _fall(spectrum, end), sum(spectrum.counts)
        tip = name if kept is None else f"{name}: {kept} of {total} directions kept"
        paths.append(Drawn(curve([(x / end, axis.top(y)) for x, y in fall]), f"line {style}", tip))
        if kept is not None and total > 0:
            stop = (min(kept / total / end, 1), axis.top(_height(fall, kept / total)))
            paths.append(Drawn(dots([stop]), f"stop {style}"))
        ends += [(style, name, axis.position(fall[-1][1]))] if fall else []
    texts = ["1" if not t else f"1e{t:g}" for t in axis.ticks]
    middle, last = (f"{100 * at * end:.2g} %" if end < 1 else f"{100 * at:g} %" for at in (0.5, 1))
    ticks, labels = [(0, "0"), (0.5, middle), (1, last)], end_labels(ends, height=PANEL_HEIGHT)
    return Plot(label, axis, texts, ticks, "share of directions", paths, ends=labels)


FEW = 0.5
"""Share of directions that carry something, below which the axis ends with them."""


def _last_share(spectra: Sequence[Spectrum]) -> float:
    """Share of directions at which the axis ends: 1, or where the last of few that are above the smallest size lies."""
    shares = [1 - s.counts[0] / sum(s.counts) for s in spectra if sum(s.counts)]
    return longest if 0 < (longest := max(shares, default=1.0)) < FEW else 1.0


def _fall(spectrum: Spectrum, end: float) -> list[Point]:
    """Points (share of eigenvalues above, log10 of size), falling; without null directions if `end` < 1."""
    total = sum(spectrum.counts)
    if not total:
        return []
    above = [0, *accumulate(reversed(spectrum.counts))]
    points = [(n / total, edge) for n, edge in zip(above, reversed(spectrum.edges), strict=True)]
    first = next(i for i, n in enumerate(above) if n) - 1  # bins above the largest eigenvalue hold nothing
    shown = total if end == 1 else total - spectrum.counts[0]
    last = next(i for i, n in enumerate(above) if n >= shown)
    return points[first : last + 1]


def _height(points: Sequence[Point], share: float) -> float:
    """The curve at `share`, linear between points."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if share <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return points[-1][1] if points else 0.0


Item = TypeVar("Item")


class Cell(NamedTuple):
    """One cell: its colour class and its tool tip."""

    colour: str
    tip: str


class Strip(NamedTuple):
    """One row of cells, None where there is none, with its name to the left and `total` to the right."""

    name: str
    cells: Sequence[Cell | None]
    total: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Rows over layers on the scale of their numbers.

    Args:
        rows, columns: cells, and labels of the columns.
        total_title: of the numbers to the right.
        values: all numbers shown, from 0 to 1 and above.
    """

    rows: Sequence[Strip]
    columns: Sequence[str]
    total_title: str
    values: Sequence[float]

    @property
    def scale(self) -> HeatScale:
        """Colours of the numbers."""
        return HeatScale.over(self.values)

    @property
    def alike(self) -> tuple[float, float] | None:
        """The smallest and the largest number, where all look the same: a sentence says more than colours."""
        return spread(self.values)

    @property
    def ticks(self) -> Ticks:
        """Labels below the columns."""
        return layer_ticks(self.columns)


def largest_strips(
    kinds: Iterable[tuple[str, Sequence[Item]]],
    depths: Sequence[int | None],
    *,
    depth: Callable[[Item], int | None],
    value: Callable[[Item], float],
    cell: Callable[[Item], Cell],
    text: Callable[[float], str],
) -> list[Strip]:
    """One row per kind, one cell per depth: the item of the largest value there, and the largest of all as total."""
    rows = []
    for kind, items in kinds:
        largest = (max((i for i in items if depth(i) == d), key=value, default=None) for d in depths)
        rows.append(Strip(kind, [None if i is None else cell(i) for i in largest], text(max(map(value, items)))))
    return rows
