"""Parts of a figure: caption, plot area, axes, legend, and the same numbers as a table.

Plot areas are SVG stretched to the width of the page; labels are text of the page beside them, so that they keep their
size on any screen and on paper. Coordinates inside run from 0 to 1, or count cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actmat.extras.pages.html.elements import Child, Markup, columns_table, el
from actmat.extras.pages.html.scales import EXPERT_COLOURS, Axis, tick_indices

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
