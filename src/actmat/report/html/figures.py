"""Parts of a figure: caption, plot area, axes, legend, and the same numbers as a table.

Plot areas are SVG stretched to the width of the page; labels are text of the page beside them, so that they keep their
size on any screen and on paper. Coordinates inside run from 0 to 1, or count cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actmat.report.html.elements import Child, Markup, columns_table, el
from actmat.report.html.scales import EXPERT_COLOURS, Axis, tick_indices

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


def frame(area: Markup, left: Markup, below: Markup, *, x_title: Child) -> Markup:
    """A plot area with an axis to its left and one below."""
    return el("div", left, el("div", area, class_="area"), below, el("div", x_title, class_="x-title"), class_="frame")


def y_labels(axis: Axis, text: Sequence[str]) -> Markup:
    """Labels of an upward axis."""
    spans = (
        el("span", t, style=f"bottom:{100 * axis.position(v):.2f}%") for v, t in zip(axis.ticks, text, strict=True)
    )
    return el("div", *spans, class_="y-axis", aria_hidden="true")


def x_labels(labels: Iterable[tuple[float, str]]) -> Markup:
    """Labels (position from 0 to 1, text) along the bottom."""
    spans = (el("span", t, style=f"left:{100 * p:.2f}%") for p, t in labels)
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
    items = [
        el("li", plot([el("path", d="M0 1H4", class_=f"line {c}")], width=4, height=2, label="", class_="key"), name)
        for c, name in entries
    ]
    return el("ul", *items, class_="legend")


def heat_legend(classes: Sequence[str], low: str, high: str, *beyond: tuple[str, str]) -> Markup:
    """A ramp of colours between two words, and single colours with a word each."""
    cells = (el("rect", class_=c, x=i, y=0, width=1, height=1) for i, c in enumerate(classes))
    ramp = plot(cells, width=len(classes), height=1, label="", class_="ramp")
    swatches = (
        (plot([el("rect", class_=c, width=1, height=1)], width=1, height=1, label="", class_="swatch"), word)
        for c, word in beyond
    )
    return el("ul", el("li", low, ramp, high), *(el("li", *s) for s in swatches), class_="legend")
