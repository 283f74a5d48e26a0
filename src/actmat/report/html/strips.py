"""Heat maps: one strip per row, one cell per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from actmat.report.html.figures import layer_labels, plot
from actmat.report.html.markup import Child, Markup, el

__all__ = ["Cell", "Strip", "largest_strips", "strips"]

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
        rows.append(Strip(el("code", kind), kind, cells, text(max(map(value, items)))))
    return rows
