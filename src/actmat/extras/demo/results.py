"""Results of the demo: typed, as JSON, and as tables of 80 columns.

Shapes: `T` tasks, `N` photographs of the test part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from actmat.extras.demo.intervals import Interval, mean_interval, wilson_interval

__all__ = ["DemoResult", "Row", "accuracy_table", "drop_table", "next_command", "score_row"]

RowKind = Literal["majority", "base", "expert", "merged"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. All accuracies are shares of the test photographs, with 95 % intervals.

    Args:
        name: a method, or "majority", "base", "experts".
        kind: what the line is about; in the line of kind "expert" every task is answered by its own expert.
        tasks: task -> accuracy (Wilson interval).
        average: mean over tasks; its interval is over photographs.
        normalised: mean over tasks of the accuracy divided by the expert's.
        drops: task -> the expert's accuracy minus this one; below zero where the expert is beaten.
    """

    name: str
    kind: RowKind
    tasks: Mapping[str, Interval]
    average: Interval
    normalised: float
    drops: Mapping[str, float]


def score_row(name: str, kind: RowKind, right: Mapping[str, Tensor], expert: Mapping[str, Tensor]) -> Row:
    """A line from the answers that are right, by task, bool `N`: the model's and the experts'."""
    tasks = {task: wilson_interval(int(right_N.sum()), len(right_N)) for task, right_N in right.items()}
    reference = {task: float(right_N.double().mean()) for task, right_N in expert.items()}
    return Row(
        name=name,
        kind=kind,
        tasks=tasks,
        average=mean_interval(torch.stack(list(right.values()))),
        normalised=sum(tasks[t].value / reference[t] for t in tasks) / len(tasks),
        drops={t: reference[t] - tasks[t].value for t in tasks},
    )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All of one run of the demo, as in `results.json`.

    Args:
        out: folder of the checkpoints.
        tasks: name, look, question and number of classes of each task.
        n_photographs: photographs per part of the split.
        rows: lines of the table; the methods come last, in the order in which they were run.
        left_out: method -> why it was not run.
        versions: of what computed the numbers.
        seconds: wall time per phase.
    """

    out: Path
    seed: int
    settings: Mapping[str, Any]
    tasks: Sequence[Mapping[str, Any]]
    n_photographs: Mapping[str, int]
    rows: Sequence[Row]
    left_out: Mapping[str, str]
    versions: Mapping[str, str]
    seconds: Mapping[str, float]

    def row(self, name: str) -> Row:
        """The line called `name`; KeyError if there is none."""
        return {row.name: row for row in self.rows}[name]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"out": str(self.out)}

    @property
    def task_names(self) -> list[str]:
        """Names of the tasks, in the order of the columns."""
        return [str(task["name"]) for task in self.tasks]


def accuracy_table(result: DemoResult, title: str = "") -> Table:
    """Test accuracy in percent, one line per model, methods in descending order of their average."""
    names = result.task_names
    table = _table(
        title or f"Test accuracy in %, {result.n_photographs['test']} photographs, seed {result.seed}",
        "average: ± half of its 95 % interval; of expert: mean of accuracy / expert's\n"
        "experts: each task by its own expert. results.json has all intervals.",
        [*names, "average", "of expert"],
    )
    best = max((r.average.value for r in result.rows if r.kind == "merged"), default=1.0)
    for row, last_of_kind in _ordered(result.rows):
        average = f"{100 * row.average.value:.1f} ±{100 * row.average.half:.1f}"
        cells = [f"{100 * row.tasks[name].value:.1f}" for name in names]
        style = "bold" if row.kind == "merged" and row.average.value == best else None
        table.add_row(row.name, *cells, average, f"{100 * row.normalised:.1f}", style=style, end_section=last_of_kind)
    return table


def drop_table(result: DemoResult) -> Table:
    """Points that every task loses against its own expert, methods in the order of `accuracy_table`."""
    names = result.task_names
    table = _table("Points lost against the task's own expert", "worst: the task that loses most.", [*names, "worst"])
    for row, last_of_kind in _ordered([r for r in result.rows if r.kind in ("base", "merged")]):
        lost = [100 * row.drops[name] for name in names]
        # `+ 0.0` turns a rounded -0.0 into 0.0
        table.add_row(row.name, *(f"{round(x, 1) + 0.0:.1f}" for x in (*lost, max(lost))), end_section=last_of_kind)
    return table


def next_command(base: Path, experts: Sequence[Path], out: str = "my-merge") -> str:
    """The `actmat merge` command, as a shell takes it, on the checkpoints that were kept."""
    lines = ["actmat merge", f"--base {quote(str(base))}", *(f"--expert {quote(str(e))}" for e in experts)]
    return " \\\n  ".join([*lines, f"--method actmat --out {quote(out)}"])


def _table(title: str, caption: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _ordered(rows: Sequence[Row]) -> list[tuple[Row, bool]]:
    """Rows with the merged ones last, best first (ties keep their order), and whether a rule goes below each."""
    fixed = [r for r in rows if r.kind != "merged"]
    merged = sorted((r for r in rows if r.kind == "merged"), key=lambda r: -r.average.value)
    return [(r, r is fixed[-1]) for r in fixed] + [(r, False) for r in merged]
