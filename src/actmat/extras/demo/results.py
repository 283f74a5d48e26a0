"""Results of the demo: typed, with 95 % intervals, as JSON, and as tables of 80 columns.

Shapes: `T` tasks, `N` photographs or texts of the test part.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from actmat.version import __version__

Z_95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A share between 0 and 1 and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half its width."""
        return (self.high - self.low) / 2


def wilson_interval(n_right: float, n: int) -> Interval:
    """95 % interval of a share: `(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)`.

    Unlike the textbook's `p +- z sqrt(p(1-p)/n)` it stays within 0..1 and holds near the ends.
    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927.
    """
    share, z2 = n_right / n, Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(correct_TN: Tensor) -> Interval:
    """Mean over tasks, `m +- z s / sqrt(N)` with `s` the standard deviation, over items, of their mean scores.

    For tasks that are tested on the same items: an item, not an answer, is what was drawn at random.
    """
    score_N = correct_TN.double().mean(0)
    half = Z_95 * float(score_N.std()) / math.sqrt(len(score_N))
    mean = float(score_N.mean())
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half))


RowKind = Literal["majority", "base", "expert", "merged"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. All accuracies are shares of the test photographs, with 95 % intervals.

    Args:
        name: a method, or "majority", "base", "experts".
        kind: subject of the line; in the line of kind "expert" every task is answered by its own expert.
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


def score_rows(
    majority: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    experts: Mapping[str, Tensor],
    merged: Mapping[str, Mapping[str, Tensor]],
) -> list[Row]:
    """All lines of the table, from right answers by task; `merged`: those of each method."""
    return [
        score_row("majority", "majority", majority, experts),
        score_row("base", "base", base, experts),
        score_row("experts", "expert", experts, experts),
        *(score_row(method, "merged", right, experts) for method, right in merged.items()),
    ]


def versions_of(*libraries: str) -> dict[str, str]:
    """Versions of actmat, Python and some libraries."""
    return {"actmat": __version__, "python": platform.python_version(), **{n: version(n) for n in libraries}}


def seconds_of(laps: Sequence[float]) -> dict[str, float]:
    """Wall time per phase, from seconds at the start and after each phase."""
    phases = zip(("base", "experts", "merges", "evaluation"), laps, laps[1:], strict=False)
    return {phase: round(end - start, 2) for phase, start, end in phases}


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All of one run of the demo, as in `results.json`.

    Args:
        out: folder of the checkpoints.
        tasks: name, look, question and number of classes of each task.
        n_photographs: photographs per part of the split.
        rows: lines of the table; the methods come last, in the order in which they were run.
        left_out: method -> the reason why it was not run.
        versions: of the software that computed the numbers.
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

    def save(self, path: Path) -> None:
        """Write all of it as JSON."""
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8", newline="\n")

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
    """Rows with the merged ones last, best first (ties keep their order), and True for those with a rule below."""
    fixed = [r for r in rows if r.kind != "merged"]
    merged = sorted((r for r in rows if r.kind == "merged"), key=lambda r: -r.average.value)
    return [(r, r is fixed[-1]) for r in fixed] + [(r, False) for r in merged]
