"""Heat maps: one strip per row, one cell per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actmat.report.html.figures import layer_labels, plot
from actmat.report.html.markup import Child, Markup, el

__all__ = ["Cell", "Strip", "strips"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: its colour class and its tool tip."""

    colour: str
    tip: str


@dataclass(frozen=True, slots=True)
class Strip:
    """One row; `label` stands to the left, `total` to the right."""

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
    return el(
        "div",
        el("div", class_="strip-label"),
        el("div"),
        el("div", total_title, class_="strip-total"),
        *body,
        el("div"),
        layer_labels(columns),
        el("div"),
        el("div"),
        el("div", x_title, class_="x-title"),
        el("div"),
        class_="strips",
    )
