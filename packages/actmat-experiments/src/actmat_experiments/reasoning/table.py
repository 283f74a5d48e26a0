"""The layout of the paper's table: a row per model, `@1` and `@k` per benchmark, the average over `@1`.

Averages with their intervals, tuned scales and the paper's figures are the harness's `average_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from actmat_experiments.harness.results import Score
from actmat_experiments.harness.table import markdown, new_table

__all__ = ["Columns", "at_k_markdown", "at_k_rows", "at_k_table"]

Columns = Sequence[tuple[str, str]]
"""Task of the scores -> head of the column, in order."""


def at_k_rows(
    scores: Sequence[Score], columns: Columns, order: Sequence[str], cell: Callable[[float, float], str]
) -> list[list[str]]:
    """A row per model: its name and a cell per column, mean over seeds; empty where there is no score.

    Args:
        scores: of one suite, model, settings and kind of scale.
        order: names of the rows; those without a score are left out.
        cell: text for a share and half its 95 % interval, both in percent (the widest of the seeds).
    """
    found: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        found.setdefault((score.method, score.task), []).append(score)
    rows = []
    for name in order:
        cells = []
        for task, _ in columns:
            some = found.get((name, task), [])
            if some:
                mean = sum(s.share for s in some) / len(some)
                half = max((s.detail["high"] - s.detail["low"]) / 2 for s in some)
                cells.append(cell(100 * mean, 100 * half))
            else:
                cells.append("")
        if any(cells):
            rows.append([name, *cells])
    return rows


def at_k_table(title: str, scores: Sequence[Score], columns: Columns, order: Sequence[str], caption: str = "") -> Table:
    """For the terminal: percent without intervals, which would not fit."""
    table = new_table(title, [head for _, head in columns], caption)
    for row in at_k_rows(scores, columns, order, lambda share, half: f" {share:.1f}"):
        table.add_row(*row)
    return table


def at_k_markdown(scores: Sequence[Score], columns: Columns, order: Sequence[str]) -> str:
    """For a page: percent with half of the 95 % interval."""
    head = ["", *(h.replace("\n", " ") for _, h in columns)]
    rows = at_k_rows(scores, columns, order, lambda share, half: f"{share:.1f} ±{half:.1f}")
    return markdown(head, [[f"`{row[0]}`", *row[1:]] for row in rows])
