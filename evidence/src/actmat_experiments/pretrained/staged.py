"""The row `regmean++`: RegMean whose statistics come through the merged blocks (see `actmat.staged_statistics`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from actmat import staged_statistics
from actmat_experiments.harness.cache import code_digest
from actmat_experiments.harness.experiment import Experiment, Made, MergeInputs
from actmat_experiments.harness.merging import Candidate, merging_code
from actmat_experiments.harness.models import is_adapter

REGMEAN_PP = Candidate("regmean++", "regmean", {"off_diagonal": 0.95})
"""With the factor that was published for vision; the options of `regmean` itself are the paper's of ACTMat."""


def staged_inputs(experiment: Experiment) -> MergeInputs:
    """The experts of an experiment as full checkpoints, and their staged statistics.

    The model that runs is the base; its blocks are those of `actmat.staged_statistics`.
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
                {task: partial(experiment.inputs, task, experiment.samples) for task in experts},
                out=folder,
                off_diagonal=float(REGMEAN_PP.options["off_diagonal"]),
            )

    place = experiment.cache.get("staged", key, make)
    measured: Mapping[str, Made] = {task: Made(place / task, place.name) for task in experts}
    return MergeInputs(experts, measured)


def _full(experiment: Experiment, task: str, made: Made) -> Made:
    """An expert, an adapter as the model that it makes of the base: no block of an adapter can be put into a model."""
    if not is_adapter(made.path):
        return made
    place = experiment.cache.get(
        "full",
        {"base": experiment.base.digest, "adapter": made.digest},
        lambda folder: experiment.load(made.path).save_pretrained(folder),
    )
    return Made(place, place.name)
