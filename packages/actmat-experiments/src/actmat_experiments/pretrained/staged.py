"""The row `regmean++`: RegMean whose statistics come through the merged blocks (see `actmat.staged_statistics`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from actmat import staged_statistics
from actmat_experiments.harness.cache import code_digest
from actmat_experiments.harness.experiment import Experiment, Made, MergeInputs
from actmat_experiments.harness.merging import Candidate, merging_code

REGMEAN_PP = Candidate("regmean++", "regmean", {"off_diagonal": 0.95})
"""With the factor that was published for vision; the options of `regmean` itself are the paper's of ACTMat."""


@runtime_checkable
class HasInputs(Protocol):
    """An experiment that gives the inputs that its statistics are measured on."""

    def inputs(self, task: str, n: int) -> Iterable[Mapping[str, Tensor]]:
        """Batches of the first `n` inputs of a task."""


def staged_inputs(experiment: Experiment, inputs: HasInputs) -> MergeInputs:
    """The experts of an experiment as full checkpoints, and their staged statistics.

    The model that runs is the base; its blocks are those of `actmat.staged_statistics`.

    Args:
        inputs: the same experiment.
    """
    experts = {task: _full(experiment, task, made) for task, made in experiment.experts().items()}
    key = {
        "base": experiment.base.digest,
        "experts": [[task, made.digest] for task, made in experts.items()],
        "content": experiment.content(experiment.names, [experiment.measured]),
        "samples": experiment.samples,
        "options": dict(REGMEAN_PP.options),
        "code": [code_digest("statistics", "api"), merging_code()],
    }

    def make(folder: Path) -> None:
        with experiment.watch.stage(f"staged statistics ({experiment.regime})", total=1):
            staged_statistics(
                *(experiment.load(experiment.base.path), experiment.base.path),
                {task: made.path for task, made in experts.items()},
                {task: partial(inputs.inputs, task, experiment.samples) for task in experts},
                out=folder,
                off_diagonal=float(REGMEAN_PP.options["off_diagonal"]),
            )

    place = experiment.cache.get("staged", key, make)
    measured: Mapping[str, Made] = {task: Made(place / task, place.name) for task in experts}
    return MergeInputs(experts, measured)


def _full(experiment: Experiment, task: str, made: Made) -> Made:
    """An expert, an adapter as the model that it makes of the base: no block of an adapter can be put into a model."""
    if not (made.path / "adapter_config.json").is_file():
        return made
    place = experiment.cache.get(
        "full",
        {"base": experiment.base.digest, "adapter": made.digest},
        lambda folder: experiment.load(made.path).save_pretrained(folder),
    )
    return Made(place, place.name)
