"""The tables of the demo and the command to go on with; every line fits 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from rich import box
from rich.table import Table

from actmat.demo.results import DemoResult, Row

__all__ = ["accuracy_table", "drop_table", "next_command"]


def accuracy_table(result: DemoResult) -> Table:
    """Test accuracy in percent, one line per model, methods in descending order of their average."""
    names = [str(t["name"]) for t in result.tasks]
    n_test = result.n_photographs["test"]
    table = _table(
        f"Test accuracy in %, {n_test} photographs, seed {result.seed}",
        "average: ± half of its 95 % interval; of expert: mean of accuracy / expert's\n"
        "experts: each task by its own expert. results.json has all intervals.",
    )
    for name in (*names, "average", "of expert"):
        table.add_column(name, justify="right", no_wrap=True)
    best = max((r.average.value for r in result.rows if r.kind == "merged"), default=1.0)
    for row, last_of_kind in _ordered(result.rows):
        average = f"{100 * row.average.value:.1f} ±{50 * (row.average.high - row.average.low):.1f}"
        cells = [f"{100 * row.tasks[name].value:.1f}" for name in names]
        style = "bold" if row.kind == "merged" and row.average.value == best else None
        table.add_row(row.name, *cells, average, f"{100 * row.normalised:.1f}", style=style, end_section=last_of_kind)
    return table


def drop_table(result: DemoResult) -> Table:
    """Points that every task loses against its own expert, methods in the order of `accuracy_table`."""
    names = [str(t["name"]) for t in result.tasks]
    table = _table("Points lost against the task's own expert", "worst: the task that loses most.")
    for name in (*names, "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for row, last_of_kind in _ordered([r for r in result.rows if r.kind in ("base", "merged")]):
        lost = [100 * row.drops[name] for name in names]
        # `+ 0.0` turns a rounded -0.0 into 0.0
        table.add_row(row.name, *(f"{round(x, 1) + 0.0:.1f}" for x in (*lost, max(lost))), end_section=last_of_kind)
    return table


def next_command(base: Path, experts: Sequence[Path], out: str = "my-merge") -> str:
    """The `actmat merge` command, as a shell takes it, on the checkpoints that were kept."""
    lines = ["actmat merge", f"--base {quote(str(base))}", *(f"--expert {quote(str(e))}" for e in experts)]
    return " \\\n  ".join([*lines, f"--method actmat --out {quote(out)}"])


def _table(title: str, caption: str) -> Table:
    table = Table(title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("", no_wrap=True)
    return table


def _ordered(rows: Sequence[Row]) -> list[tuple[Row, bool]]:
    """Rows with the merged ones last, best first (ties keep their order), and whether a rule goes below each."""
    fixed = [r for r in rows if r.kind != "merged"]
    merged = sorted((r for r in rows if r.kind == "merged"), key=lambda r: -r.average.value)
    return [(r, r is fixed[-1]) for r in fixed] + [(r, False) for r in merged]
