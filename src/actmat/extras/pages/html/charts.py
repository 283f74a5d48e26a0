"""Figures: caption, plot area, axes, legend, the same numbers as a table; lines over layers, spectra, heat maps.

Plot areas are SVG stretched to the width of the page; labels are text of the page next to them, so that they keep their
size on any screen and on paper. Coordinates inside run from 0 to 1, or count cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from actmat.diagnostics.model import Spectrum
from actmat.extras.pages.html.elements import Child, Markup, columns_table, dotted, el, join
from actmat.extras.pages.html.scales import EXPERT_COLOURS, Axis, number, tick_indices

TENTHS = tuple(f"q{i}" for i in range(10))
"""Colour classes of the tenths from 0 to 1."""


def figure(title: str, *children: Child, note: Child = None) -> Markup:
    """A figure with its title on top and a note on reading it below the title."""
    caption = el("figcaption", el("strong", title), el("span", note, class_="note") if note is not None else None)
    return el("figure", caption, *children)


def numbers(head: Iterable[Child], rows: Iterable[Iterable[Child]], *, caption: str) -> Markup:
    """The numbers of a figure as a table, folded away."""
    return el("details", el("summary", "The numbers"), columns_table(head, rows, caption=caption), class_="numbers")


def plot(shapes: Iterable[Child], *, width: float, height: float, label: str, class_: str = "plot") -> Markup:
    """The stretched SVG of a plot area."""
    box = f"0 0 {width:g} {height:g}"
    return el("svg", *shapes, class_=class_, viewBox=box, preserveAspectRatio="none", role="img", aria_label=label)


def frame(area: Markup, left: Markup, below: Markup, *, x_title: Child, right: Markup | None = None) -> Markup:
    """A plot area with an axis to its left, one below, and labels of its lines to the right."""
    title = el("div", x_title, class_="x-title")
    shown = [left, el("div", area, class_="area"), right, below, title]
    return el("div", *shown, class_="frame" if right is None else "frame ended")


MOST_ENDS = 8
"""Lines that are labelled at their ends; more than that would not fit below each other."""
LONGEST_END = 16
"""Characters of such a label."""


def end_labels(entries: Sequence[tuple[str, str, float]], *, height: int) -> Markup | None:
    """Names of lines at their right ends: (class, name, height from 0 to 1); None where they would not fit.

    Args:
        entries: one per line.
        height: of the plot area, in pixels.
    """
    if not entries or len(entries) > MOST_ENDS or max(len(n) for _, n, _ in entries) > LONGEST_END:
        return None
    gap = LINE_HEIGHT / height
    places: list[float] = []
    ordered = sorted(entries, key=lambda e: e[2])
    for _, _, wanted in ordered:
        places.append(max(wanted, places[-1] + gap) if places else wanted)
    over = max(0.0, places[-1] - 1.0)
    if over:  # from the top down again, each as far as it must
        limit = 1.0
        for i in reversed(range(len(places))):
            places[i] = min(places[i], limit)
            limit = places[i] - gap
    spans = (
        el("span", line_key(style), name, style=f"bottom:{100 * place:.2f}%")
        for (style, name, _), place in zip(ordered, places, strict=True)
    )
    wide = 3 + 0.65 * max(len(name) for _, name, _ in entries)
    return el("div", *spans, class_="ends", style=f"min-width:{wide:.1f}em")


LINE_HEIGHT = 15
"""Pixels from one label at the end of a line to the next."""


def line_key(style: str) -> Markup:
    """A sample of a line."""
    return plot([el("path", d="M0 1H4", class_=f"line {style}")], width=4, height=2, label="", class_="key")


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled bar: its length from 0 to 1, its number, and its colour class."""

    name: Child
    length: float
    text: str
    style: str


def bars(rows: Iterable[Bar]) -> Markup:
    """Bars below each other, each with its name and its number."""
    cells: list[Child] = []
    for row in rows:
        shape = el("rect", width=f"{100 * min(1.0, max(0.0, row.length)):.2f}", height=8, class_=f"bar {row.style}")
        track = el("rect", width=100, height=8, class_="track")
        cells += [
            el("div", row.name, class_="bar-name"),
            plot([track, shape], width=100, height=8, label="", class_="bar-area"),
            el("div", row.text, class_="bar-number"),
        ]
    return el("div", *cells, class_="bar-rows")


def gauge(share: float, text: str, colour: str, mark: float | None = None) -> Markup:
    """A number with a bar below it; `mark` is a line across."""
    shapes = [
        el("rect", width=100, height=8, class_="track"),
        el("rect", width=f"{100 * min(1.0, max(0.0, share)):.2f}", height=8, class_=f"bar {colour}"),
        el("path", d=f"M{100 * mark:.2f} 0V8", class_="mark") if mark is not None else None,
    ]
    return el("div", el("span", text), plot(shapes, width=100, height=8, label="", class_="gauge"), class_="gauged")


def y_labels(axis: Axis, text: Sequence[str]) -> Markup:
    """Labels of an upward axis."""
    spans = (
        el("span", t, style=f"bottom:{100 * axis.position(v):.2f}%") for v, t in zip(axis.ticks, text, strict=True)
    )
    return el("div", *spans, class_="y-axis", aria_hidden="true")


def x_labels(labels: Iterable[tuple[float, str]]) -> Markup:
    """Labels (position from 0 to 1, text) along the bottom."""
    spans = (el("span", t, style=f"left:{100 * p:.2f}%", class_="at-end" if p > 0.97 else None) for p, t in labels)
    return el("div", *spans, class_="x-axis", aria_hidden="true")


def layer_labels(columns: Sequence[str]) -> Markup:
    """Labels below one column per layer, as many as fit a narrow screen, always with the last if it is no layer."""
    wide = len(columns)
    ticks = tick_indices(wide, 10)
    if columns[-1] == "other" and wide - 1 not in ticks:
        ticks = [*(i for i in ticks if i < wide - 1 - wide / 10), wide - 1]
    return x_labels(((i + 0.5) / wide, columns[i]) for i in ticks)


def expert_class(expert: int) -> str:
    """Colour and dash of an expert's line."""
    dashes = ("", " dash", " dots")
    return f"e{expert % EXPERT_COLOURS}{dashes[min(expert // EXPERT_COLOURS, 2)]}"


def line_legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Sample and name of every line: (class, name)."""
    return el("ul", *(el("li", line_key(c), name) for c, name in entries), class_="legend")


def heat_legend(classes: Sequence[str], low: str, high: str, *beyond: tuple[str, str]) -> Markup:
    """A ramp of colours between two words, and single colours with a word each."""
    cells = (el("rect", class_=c, x=i, y=0, width=1, height=1) for i, c in enumerate(classes))
    ramp = plot(cells, width=len(classes), height=1, label="", class_="ramp")
    swatches = (
        (plot([el("rect", class_=c, width=1, height=1)], width=1, height=1, label="", class_="swatch"), word)
        for c, word in beyond
    )
    return el("ul", el("li", low, ramp, high), *(el("li", *s) for s in swatches), class_="legend")


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
