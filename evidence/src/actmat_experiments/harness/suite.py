"""Run the experiments of a suite."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.experiment import Experiment
from actmat_experiments.harness.merging import KINDS, Candidate
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.results import Regime, Score
from actmat_experiments.harness.rows import candidates
from actmat_experiments.harness.sizes import size_file, store_size

Experiments = Callable[[RunRequest, Watch], Iterator[Experiment]]
"""One experiment per model, seed and regime of a request; shared data are made on the first request."""


def known_names(asked: Sequence[str] | None, known: Collection[str], kind: str = "task") -> list[str]:
    """The tasks, or others of a kind, that a request asks for; all where it names none.

    Raises:
        RecipeError: some are unknown.
    """
    if unknown := [f"'{n}' is no {kind}.{did_you_mean(n, known)}" for n in asked or () if n not in known]:
        raise RecipeError(f"The {kind}s are {', '.join(known)}.", unknown)
    return list(asked or known)


def data_folder(request: RunRequest, content: str) -> Path:
    """The folder of a suite that has local data only.

    Args:
        content: of the folder.

    Raises:
        RecipeError: none was given.
    """
    if request.data is None:
        raise RecipeError(f"The suite {request.suite} takes its data from a folder: give --data DIR with {content}.")
    return request.data


def refuse_flags(request: RunRequest, *flags: Literal["models", "data"], regime: Regime | None = None) -> None:
    """Refuse what a suite has not.

    Args:
        flags: that it does not take, since it makes its models, or its data.
        regime: the only one in which it trains experts.

    Raises:
        RecipeError: the request has one of the flags, or another regime.
    """
    problems = [f"the suite makes its {flag} itself: leave out --{flag}" for flag in flags if getattr(request, flag)]
    if regime and tuple(request.regimes) != (regime,):
        others = {"full": "--lora and --no-full", "lora": "--full and --no-lora"}[regime]
        problems.append(f"experts are trained in the regime '{regime}' only: leave out {others}")
    if problems:
        raise RecipeError(f"The suite {request.suite} cannot be run so.", problems)


def request_fields(request: RunRequest, watch: Watch) -> dict[str, Any]:
    """Fields of all experiments of a request."""
    threads = request.threads or os.cpu_count() or 1
    fields = {"suite": request.suite, "cache": Cache(request.cache), "watch": watch, "device": request.device}
    return {**fields, "threads": threads}


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
