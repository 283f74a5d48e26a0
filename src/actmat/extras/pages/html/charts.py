"""Lines over layers, spectra as falling curves, and heat maps with one strip per row and one cell per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from actmat.diagnostics.model import Spectrum
from actmat.extras.pages.html.elements import Child, Markup, dotted, el, join
from actmat.extras.pages.html.figures import end_labels, frame, layer_labels, line_legend, plot, x_labels, y_labels
from actmat.extras.pages.html.scales import Axis, number

__all__ = ["Cell", "Line", "Strip", "largest_strips", "layer_lines", "scree", "strips"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its class, name and a value per layer (None leaves a gap)."""

    style: str
    name: str
    values: Sequence[float | None]


def layer_lines(
    lines: Sequence[Line], columns: Sequence[str], axis: Axis, *, label: str, floor: float | None = None
) -> Markup:
    """Lines over layers with a dot at each value; the area below `floor`, if given, is shaded."""
    wide = len(columns)
    shapes: list[Child] = []
    if floor is not None:
        top = axis.top(floor)
        shapes.append(el("rect", x=0, y=f"{top:.4f}", width=wide, height=f"{1 - top:.4f}", class_="ground"))
        shapes.append(el("path", d=f"M0 {top:.4f}H{wide}", class_="floor"))
    shapes += [el("path", d=f"M0 {axis.top(t):.4f}H{wide}", class_="grid") for t in axis.ticks]
    for line in lines:
        points = [None if v is None else (i + 0.5, axis.top(v)) for i, v in enumerate(line.values)]
        along = points[:-1] if columns[-1] == "other" else points  # matrices outside the layers are no next layer
        shapes.append(el("path", d=curve(along), class_=f"line {line.style}"))
        dots = "".join(f"M{p[0]:g} {p[1]:.4f}h0" for p in points if p)
        shapes.append(el("path", d=dots, class_=f"dot {line.style}"))
    for i, column in enumerate(columns):
        said = [f"{line.name} {number(line.values[i])}" for line in lines if line.values[i] is not None]
        tip = f"{'outside the layers' if column == 'other' else 'layer ' + column}: " + ", ".join(said)
        shapes.append(el("rect", class_="hit", x=i, y=0, width=1, height=1, data_tip=tip))
    below = layer_labels(columns)
    area = plot(shapes, width=wide, height=1, label=label)
    inside = -1 if columns[-1] == "other" and wide > 1 else wide
    lasts = [(line, _last(line.values[:inside]) or _last(line.values)) for line in lines]
    ends = [(line.style, line.name, axis.position(v)) for line, v in lasts if v is not None]
    right = end_labels(ends, height=AREA_HEIGHT)
    drawn = frame(area, y_labels(axis, [number(t) for t in axis.ticks]), below, x_title="layer", right=right)
    return drawn if right is not None else join([line_legend((line.style, line.name) for line in lines), drawn])


def _last(values: Sequence[float | None]) -> float | None:
    return next((v for v in reversed(values) if v is not None), None)


AREA_HEIGHT, PANEL_HEIGHT = 200, 130
"""Pixels of plot areas, the smaller ones of narrow screens, and of panels; as in style.css."""


def curve(points: Sequence[tuple[float, float] | None]) -> str:
    """SVG path through the points, interrupted at each None."""
    out, down = [], False
    for point in points:
        if point is not None:
            out.append(f"{'L' if down else 'M'}{point[0]:.4g} {point[1]:.4f}")
        down = point is not None
    return "".join(out)


def scree(spectra: Sequence[tuple[str, str, Spectrum, int | None]], *, label: str) -> Markup:
    """Falling eigenvalues: share of the directions (right) against size relative to the largest (down, log10).

    Where few directions carry anything, as in merges of adapters, the axis ends with the last of them.

    Args:
        spectra: class, name, spectrum and rank kept of each curve; a dot marks where the method stopped.
        label: for screen readers.
    """
    low = min((s.edges[0] for _, _, s, _ in spectra), default=-12.0)
    step = 2.0 if low >= -8 else 3.0
    axis = Axis(low, 0.0, tuple(-step * k for k in range(int(-low / step) + 1)))
    shapes: list[Child] = [el("path", d=f"M0 {axis.top(t):.4f}H1", class_="grid") for t in axis.ticks]
    end = _last_share([s for _, _, s, _ in spectra])
    for style, name, spectrum, kept in spectra:
        fall = _fall(spectrum, end)
        points: list[tuple[float, float] | None] = [(x / end, axis.top(y)) for x, y in fall]
        total = sum(spectrum.counts)
        tip = name if kept is None else f"{name}: {kept} of {total} directions kept"
        shapes.append(el("path", d=curve(points), class_=f"line {style}", data_tip=tip))
        if kept is not None and total > 0:
            stop = axis.top(_height(fall, kept / total))
            shapes.append(el("path", d=f"M{min(kept / total / end, 1):.4f} {stop:.4f}h0", class_=f"stop {style}"))
    area = plot(shapes, width=1, height=1, label=label)
    text = ["1" if not t else f"1e{t:g}" for t in axis.ticks]
    below = x_labels(
        [(0, "0"), *((at, f"{100 * at * end:.2g} %" if end < 1 else f"{100 * at:g} %") for at in (0.5, 1))]
    )
    ends = [(style, name, axis.position(fall[-1][1])) for style, name, s, _ in spectra if (fall := _fall(s, end))]
    right = end_labels(ends, height=PANEL_HEIGHT)
    return frame(area, y_labels(axis, text), below, x_title="share of directions", right=right)


FEW = 0.5
"""Share of directions that carry something, below which the axis ends with them."""


def _last_share(spectra: Sequence[Spectrum]) -> float:
    """Share of directions at which the axis ends: 1, or where the last of few that are above the smallest size lies."""
    shares = [1 - s.counts[0] / sum(s.counts) for s in spectra if sum(s.counts)]
    return longest if 0 < (longest := max(shares, default=1.0)) < FEW else 1.0


def _fall(spectrum: Spectrum, end: float) -> list[tuple[float, float]]:
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


def _height(points: Sequence[tuple[float, float]], share: float) -> float:
    """The curve at `share`, linear between points."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if share <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return points[-1][1] if points else 0.0


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: its colour class and its tool tip."""

    colour: str
    tip: str


@dataclass(frozen=True, slots=True)
class Strip:
    """One row, with `label` to its left and `total` to its right."""

    label: Child
    name: str
    cells: Sequence[Cell | None]
    total: Child = None


def strips(rows: Sequence[Strip], columns: Sequence[str], *, x_title: str, total_title: str | None = None) -> Markup:
    """Rows over common columns; a cell that is None stays empty."""
    wide = len(columns)
    body: list[Child] = []
    for row in rows:
        cells = (
            el("rect", class_=c.colour, x=i, y=0, width=1, height=1, data_tip=c.tip)
            for i, c in enumerate(row.cells)
            if c is not None
        )
        body += [
            el("div", row.label, class_="strip-label"),
            plot(cells, width=wide, height=1, label=f"{row.name}, one cell per column", class_="strip"),
            el("div", row.total, class_="strip-total"),
        ]
    empty, pad = el("div"), el("div", class_="pad")
    head = [el("div", class_="strip-label pad"), empty, el("div", total_title, class_="strip-total")]
    below = [pad, layer_labels(columns), empty, pad, el("div", x_title, class_="x-title"), empty]
    return el("div", *head, *body, *below, class_="strips")


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
        cells = [None if i is None else cell(i) for i in largest]
        rows.append(Strip(el("code", *dotted(kind)), kind, cells, text(max(map(value, items)))))
    return rows
