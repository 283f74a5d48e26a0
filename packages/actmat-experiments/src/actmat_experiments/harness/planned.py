"""Time, memory and disk that an experiment's merges will take, from the headers of base and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actmat.errors import format_size
from actmat_experiments.core import RunSettings, open_inputs, plan_units, planned_seconds, plans_of
from actmat_experiments.harness.experiment import Experiment
from actmat_experiments.harness.merging import Candidate, needs_statistics, recipes_of


@dataclass(frozen=True, slots=True)
class Planned:
    """The merges of an experiment.

    Args:
        what: model, regime and seed.
        merges: how many; those that need statistics, which are measured first, are left out.
        seconds: of one worker on a usual core; a guide, not a measurement.
        host_bytes: peak memory of the process, with its workers.
        device_bytes: of the largest tensor on a device that merges; 0 without one.
        disk_bytes: of merged models that lie on the disk at the same time.
    """

    what: str
    merges: int
    seconds: float
    host_bytes: int
    device_bytes: int
    disk_bytes: int

    def __str__(self) -> str:
        """One line for the terminal."""
        device = f", {format_size(self.device_bytes)} of a device's" if self.device_bytes else ""
        return (
            f"planned for {self.what}: {self.merges} merges, about {self.seconds:.0f} s of one core, up to "
            f"{format_size(self.host_bytes)} of memory{device}, {format_size(self.disk_bytes)} of disk at a time"
        )


def planned(experiment: Experiment, rows: Sequence[Candidate]) -> Planned:
    """Plan the merges of an experiment, as they will be grouped. Experts that are not there are trained now.

    Raises:
        MergeError: the inputs of a merge do not fit each other, or an option is wrong; nothing was merged yet.
    """
    experts = {name: made.path for name, made in experiment.experts().items()}
    device = experiment.device if experiment.device.startswith("cuda") else "cpu"
    settings = RunSettings(threads=experiment.threads, device=device)
    chosen = [row for row in rows if not needs_statistics([row])]
    what = f"{experiment.model or experiment.suite}, {experiment.regime}, seed {experiment.seed}"
    total = Planned(what, 0, 0.0, 0, 0, 0)
    for start in range(0, len(chosen), experiment.together):
        some = chosen[start : start + experiment.together]
        outs = {row.name: experiment.cache.root / "planned" / row.name for row in some}
        recipes = recipes_of(experiment.base.path, experts, some, outs, seed=experiment.seed)
        with open_inputs(recipes, settings, here=False) as opened:
            plans = plans_of(opened)
        units = plan_units(plans, [()] * len(plans), None)
        largest = sorted((u.host_bytes for u in units), reverse=True)[: experiment.threads or 1]
        copies = 1 if experiment.one_merge or not experiment.scales else 2  # the second one at the tuned scale
        total = Planned(
            what,
            total.merges + len(some),
            total.seconds + sum(map(planned_seconds, units)),
            max(total.host_bytes, max(plan.process_bytes for plan in plans) + sum(largest)),
            max(total.device_bytes, max((u.device_bytes for u in units), default=0)),
            max(total.disk_bytes, copies * sum(plan.write_bytes for plan in plans)),
        )
    return total
