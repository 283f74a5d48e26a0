"""Angles of Theorem 3.1 along a run; and `drift`, which measures them along a fine-tuning run (AdamW, minibatches).

The theorem is about gradient descent. For another optimizer `D` is not `-eta G`; the angle between `D^T D` and `G^T G`
says how much that matters, and with it the inequality holds again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from torch import Tensor

from actmat.extras.demo.tasks import Examples
from actmat_experiments.analyses.angles import RIGHT_ANGLE, DriftAngles
from actmat_experiments.analyses.demo import batches, load_demo
from actmat_experiments.analyses.monitor import DriftMonitor, MonitorCallback
from actmat_experiments.analyses.result import Analysis, degrees, short_names, shown
from actmat_experiments.harness.table import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ROUNDING = 1e-9
"""By how much (radians) the inequality may fail because of rounding."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of a run after `step` steps: the loss of the last one, and the angles of every linear map."""

    step: int
    loss: float
    layers: Mapping[str, DriftAngles]


def moments_until(n_steps: int, count: int = 12) -> list[int]:
    """At most `count` numbers of steps from 1 to `n_steps`, evenly spaced on a logarithmic scale."""
    if n_steps <= 1 or count <= 1:
        return [n_steps]
    return sorted({round(n_steps ** (i / (count - 1))) for i in range(count)})


@dataclass(frozen=True)
class DriftResult(Analysis):
    """Angles of every linear map at moments of a run.

    Args:
        not_read: matrices of the model that could not be read along.
    """

    title: str
    settings: Mapping[str, Any]
    moments: Sequence[Moment]
    not_read: Sequence[str] = ()

    @property
    def last(self) -> Moment:
        """The end of the run."""
        return self.moments[-1]

    def worst_excess(self) -> float:
        """Largest `angle - full_bound` of all layers and moments, in radians; above rounding the theorem is false."""
        found = [a.estimate - a.full_bound for m in self.moments for a in m.layers.values()]
        return max((x for x in found if not math.isnan(x)), default=math.nan)

    def data(self) -> dict[str, Any]:
        """Angles in radians."""
        return {
            "title": self.title,
            "settings": dict(self.settings),
            "largest_possible_angle": RIGHT_ANGLE,
            "worst_excess": self.worst_excess(),
            "not_read": list(self.not_read),
            "moments": [
                {
                    "step": m.step,
                    "loss": m.loss,
                    "layers": {
                        n: {**asdict(a), "bound": a.bound, "full_bound": a.full_bound} for n, a in m.layers.items()
                    },
                }
                for m in self.moments
            ],
        }

    def tables(self) -> list[Table]:
        """The end of the run, in degrees."""
        below = [a.full_bound < RIGHT_ANGLE for a in self.last.layers.values()]
        caption = (
            "Degrees; 90 is the largest angle between such matrices, so a bound beyond it says nothing.\n"
            "est: D^T D against C; id: the identity against C; opt: D^T D against G^T G;\n"
            "cross, corr, drift: the terms of Theorem 3.1; bound: opt + cross + corr + drift.\n"
            f"The bound lies below 90 in {sum(below)} of {len(below)} layers; "
            f"largest est - bound: {shown(math.degrees(self.worst_excess()), '.1e')}."
        )
        columns = ("est", "id", "opt", "cross", "corr", "drift", "bound")
        title = f"{self.title}: after {self.last.step} steps"
        table = new_table(title, caption, "layer", columns)
        for name, a in self.last.layers.items():
            row = (a.estimate, a.identity, a.optimizer, a.cross, a.correlation, a.drift, a.full_bound)
            table.add_row(escape(short_names([name])[name]), *(f" {degrees(x)}" for x in row))
        return [table]

    def figure(self) -> Figure:
        """One panel per linear map: angles over steps, against the right angle."""
        from actmat_experiments.harness.figures import COLORS, MARKERS, finish_panels, new_panels

        names = list(self.last.layers)
        figure, panels = new_panels(len(names), f"Theorem 3.1 along a run ({self.title})")
        steps = [m.step for m in self.moments]
        series = (
            ("angle(DᵀD, C)", "estimate", "-", 2.0),
            ("angle(identity, C)", "identity", ":", 1.4),
            ("optimizer", "optimizer", "-", 1.0),
            ("e_cross", "cross", "-", 1.0),
            ("e_corr", "correlation", "-", 1.0),
            ("e_drift", "drift", "-", 1.0),
            ("sum of the four (bound)", "full_bound", "--", 1.4),
        )
        colors = (COLORS[6], COLORS[7], COLORS[4], *COLORS[:3], COLORS[3])
        for axes, name in zip(panels, names, strict=True):
            for index, (label, field, style, weight) in enumerate(series):
                values = [math.degrees(getattr(m.layers[name], field)) for m in self.moments]
                thin = field in ("optimizer", "cross", "correlation", "drift")
                marker = MARKERS[index] if thin else None
                axes.plot(steps, values, style, color=colors[index], linewidth=weight, marker=marker, markersize=3,
                          label=label)  # fmt: skip
            axes.axhline(90, color="#333333", linewidth=0.8)
            axes.axhspan(90, 1000, color="#EEEEEE", zorder=0, label="beyond 90: a bound says nothing")
        panels[0].minorticks_off()
        panels[0].set_ylim(0, 140)
        panels[0].set_yticks((0, 30, 60, 90, 120))
        finish_panels(figure, panels, list(short_names(names).values()), "optimizer steps", "degrees")
        return figure


class DriftAlongRun(DriftResult):
    """Angles along a fine-tuning run."""

    name = "drift"


def drift(
    demo: Path,
    *,
    task: str = "digit",
    layers: Sequence[str] | None = None,
    n_moments: int = 10,
    on_step: Callable[[], object] = lambda: None,
    on_moment: Callable[[int, DriftMonitor], object] = lambda step, monitor: None,
) -> DriftAlongRun:
    """Fine-tune an expert of a demo once more, bit by bit as the demo did, with a monitor attached.

    `C` is measured on all training examples of the task, at the weights of the moment.

    Args:
        n_moments: how often to measure, evenly spaced on a logarithmic scale.
        on_moment: called at step 0 and at every moment, after the inputs of all data have been measured.

    Raises:
        CheckpointError: no demo there.
        RecipeError: an unknown task or layer.
    """
    from actmat.extras.demo.model import load_encoder
    from actmat.extras.demo.tasks import generator_for
    from actmat.extras.demo.training import task_losses
    from actmat_experiments.core import one_thread
    from actmat_experiments.harness.training import Schedule, descend

    models = load_demo(demo)
    examples = models.task(task).train
    schedule = models.settings.finetuning
    n_steps = schedule.steps(len(examples))
    wanted = set(moments_until(n_steps, n_moments))
    moments: list[Moment] = []
    expert, order = load_encoder(models.base), generator_for(models.seed, f"finetuning {task}")
    monitor = DriftMonitor(layers=layers).attach(expert)
    loss = partial(models.loss, expert, task)

    def measure(done: int) -> None:
        if done in wanted:
            moments.append(Moment(done, _read_inputs(monitor, loss, examples), monitor.angles()))
            on_moment(done, monitor)

    with contextlib.ExitStack() as stack:
        stack.callback(monitor.detach)
        stack.enter_context(one_thread())
        _read_inputs(monitor, loss, examples)
        on_moment(0, monitor)
        losses = task_losses(expert, models.heads[task], examples, schedule, order)
        watching = MonitorCallback(monitor, measure)
        parameters = list(expert.parameters())
        descend(parameters, lambda _: losses, n_steps, Schedule(**asdict(schedule)), on_step, [watching])
    settings = {"task": task, "seed": models.seed, "optimizer": "AdamW", **asdict(schedule)}
    settings |= {"n_examples": len(examples), "n_steps": n_steps}
    return DriftAlongRun(f"demo expert '{task}', AdamW", settings, moments, monitor.not_read)


def _read_inputs(monitor: DriftMonitor, loss: Callable[[Examples], Tensor], examples: Examples) -> float:
    """Measure the inputs of all examples at the weights of the moment; returns the mean loss."""
    total = 0.0
    for number, batch in enumerate(batches(examples)):
        with monitor.inputs(more=number > 0):
            total += float(loss(batch)) * len(batch)
    return total / len(examples)
