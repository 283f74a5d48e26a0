"""`trajectory`: how the second moment of every layer's inputs turns while an expert is trained.

`angle(C^(k), C^(K))` over the steps `k` of a run of `K`, per layer. Theorem 3.1's last term is small where inputs drift
little; this is the paper's picture of it. Gram matrices come from a run that is watched, or from statistics that were
collected on saved checkpoints of any training loop.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from actmat.errors import RecipeError
from actmat_experiments.analyses.angles import angle
from actmat_experiments.analyses.monitor import DriftMonitor
from actmat_experiments.analyses.result import Analysis, degrees, short_names
from actmat_experiments.core import open_statistics
from actmat_experiments.harness.table import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TrajectoryResult(Analysis):
    """`angles`: layer -> `angle(C^(k), C^(K))` in radians at every one of `steps`; the last is zero."""

    name = "trajectory"
    title: str
    steps: Sequence[int]
    angles: Mapping[str, Sequence[float]]

    def median(self) -> list[float]:
        """Over layers, at every step."""
        return [statistics.median(row[i] for row in self.angles.values()) for i in range(len(self.steps))]

    def data(self) -> dict[str, Any]:
        """Angles in radians, and their median over layers."""
        layers = {n: list(a) for n, a in self.angles.items()}
        return {"title": self.title, "steps": list(self.steps), "layers": layers, "median": self.median()}

    def tables(self) -> list[Table]:
        """Some steps of every layer, in degrees."""
        count = min(6, len(self.steps))
        chosen = sorted({round(i * (len(self.steps) - 1) / max(1, count - 1)) for i in range(count)})
        caption = "Degrees between C at the step and C at the end; 90 is the largest there can be."
        table = new_table(f"Inputs along the run: {self.title}", caption, "layer", [str(self.steps[i]) for i in chosen])
        for name, row in self.angles.items():
            table.add_row(escape(short_names([name])[name]), *(f" {degrees(row[i])}" for i in chosen))
        table.add_row("median over layers", *(f" {degrees(self.median()[i])}" for i in chosen))
        return [table]

    def figure(self) -> Figure:
        """One line per layer and their median, over steps."""
        from actmat_experiments.harness.figures import COLORS, new_axes

        figure, axes = new_axes(f"angle(C⁽ᵏ⁾, C⁽ᴷ⁾) along the run ({self.title})")
        for index, row in enumerate(self.angles.values()):
            axes.plot(self.steps, [math.degrees(a) for a in row], "-", color=COLORS[7], linewidth=0.8, alpha=0.7,
                      label=None if index else "a layer")  # fmt: skip
        axes.plot(self.steps, [math.degrees(a) for a in self.median()], "o-", color=COLORS[0], linewidth=2,
                  markersize=4, label="median over layers")  # fmt: skip
        axes.set_ylim(0, 90)
        axes.set_yticks((0, 15, 30, 45, 60, 75, 90))
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel("degrees; 90 is the largest possible")
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        return figure


class KeptGrams:
    """Gram matrices of a run on the disk, a file per moment, until the angles with the last are known."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="actmat-grams-")))
        self._steps: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def keep(self, step: int, monitor: DriftMonitor) -> None:
        """Write the monitor's last measurements; packed q, k and v share their input, and its matrix."""
        from safetensors.torch import save_file

        found: dict[str, Tensor] = {}
        for label in monitor.labels:
            found.setdefault(label.partition("[")[0], monitor.sums(label)["gram"].float().cpu())
        save_file({n: g.contiguous() for n, g in found.items()}, self._folder / f"{step}.safetensors")
        self._steps.append(step)

    def result(self, title: str) -> TrajectoryResult:
        """Angles of every moment with the last."""
        return _trajectory(title, self._steps, [self._folder / f"{s}.safetensors" for s in self._steps], _stored)


def trajectory_of_statistics(folders: Mapping[int, str | Path]) -> TrajectoryResult:
    """The trajectory from statistics of saved checkpoints, by the number of steps after which each was saved.

    Raises:
        RecipeError: fewer than two checkpoints, or no layer that all of them have.
    """
    if len(folders) < 2:
        raise RecipeError(f"A trajectory takes the statistics of two checkpoints or more; got {len(folders)}.")
    steps = sorted(folders)
    return _trajectory("saved checkpoints", steps, [Path(folders[s]) for s in steps], _collected)


def _trajectory(
    title: str, steps: Sequence[int], paths: Sequence[Path], read: Callable[[Path], Iterator[tuple[str, Tensor]]]
) -> TrajectoryResult:
    """Two moments are in memory at a time: the last, and one."""
    last = dict(read(paths[-1]))
    found: dict[str, list[float]] = {}
    for path in paths:
        for name, gram in read(path):
            if name in last and last[name].shape == gram.shape:
                found.setdefault(name, []).append(angle(gram, last[name]))
    whole = {n: row for n, row in found.items() if len(row) == len(steps)}
    if not whole:
        raise RecipeError("The moments of the run have no layer in common: their statistics are of different models.")
    return TrajectoryResult(title, tuple(steps), whole)


def _stored(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            yield name, file.get_tensor(name)


def _collected(path: Path) -> Iterator[tuple[str, Tensor]]:
    with open_statistics(path) as found:
        for key, entry in sorted(found.header.grams.items()):
            if entry.groups == 1:
                yield key, found.gram(key, dtype=torch.float64)
