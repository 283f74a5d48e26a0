"""Run the experiments of a suite."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.harness.experiment import Experiment
from actmat_experiments.harness.merging import KINDS, Candidate
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.results import Score
from actmat_experiments.harness.rows import candidates
from actmat_experiments.harness.sizes import size_file, store_size

Experiments = Callable[[RunRequest, Watch], Iterator[Experiment]]
"""One experiment per model, seed and regime of a request; shared data are made on the first request."""


def known_tasks(asked: Sequence[str], known: Collection[str]) -> list[str]:
    """The tasks that a request asks for.

    Raises:
        RecipeError: one is unknown.
    """
    if unknown := [f"'{n}' is no task.{did_you_mean(n, known)}" for n in asked if n not in known]:
        raise RecipeError(f"The tasks are {', '.join(known)}.", unknown)
    return list(asked)


def score_file(cache: Path, suite: str) -> Path:
    """File of a suite's scores."""
    return cache / "scores" / f"{suite}.jsonl"


def run_experiments(
    request: RunRequest,
    experiments: Experiments,
    n_tasks: int,
    more: Callable[[Experiment, Sequence[Candidate]], object] = lambda experiment, rows: None,
    kinds: Sequence[str] = KINDS,
) -> list[Score]:
    """Train, merge by all rows and test; scores are added to the suite's file as they become known.

    Args:
        more: what else is done with an experiment and its rows.
        kinds: statistics that the suite can measure.

    Returns:
        All scores.

    Raises:
        RecipeError: a method is unknown or cannot run; found before anything is made.
    """
    rows = {regime: candidates(request.methods, regime, n_tasks, kinds) for regime in request.regimes}
    scores: list[Score] = []
    with Watch(request.console, request.cache / "logs") as watch:
        for experiment in experiments(request, watch):
            chosen = rows[experiment.regime][0]
            scores += experiment.compare(chosen, score_file(request.cache, request.suite))
            store_size(experiment, size_file(request.cache, request.suite))
            more(experiment, chosen)
        left_out = {name: why for _, some in rows.values() for name, why in some.items()}
        watch.note(f"left out: {name} ({why})" for name, why in left_out.items())
    return scores
