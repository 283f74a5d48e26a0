"""Results of the demo: typed, and as JSON.

Shapes: `T` tasks, `N` photographs of the test part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from actmat.demo.intervals import Interval, mean_interval, wilson_interval

__all__ = ["DemoResult", "Row", "RowKind", "score_row"]

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
    """A line from what was answered rightly.

    Args:
        name: see `Row`.
        kind: see `Row`.
        right: task -> bool `N`.
        expert: the same for the experts, for the comparison.
    """
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
        seed: the one seed that everything was drawn from.
        settings: sizes and schedules.
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
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"out": str(self.out)}

    def save(self, path: Path) -> None:
        """Write `to_json` as a file."""
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
