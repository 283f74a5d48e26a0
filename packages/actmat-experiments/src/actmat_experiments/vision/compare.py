"""What is compared on a prepared `Vision`, and where the scores are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from actmat.demo.merging import Candidate
from actmat.demo.training import generator_for
from actmat_experiments.harness.merging import candidates
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.results import Regime, append_scores
from actmat_experiments.harness.study import NEIGHBOURS, VARIANTS
from actmat_experiments.harness.study_run import Answers, Subject, run_study
from actmat_experiments.suites import RunRequest
from actmat_experiments.vision.estimates import store_estimates
from actmat_experiments.vision.experiment import Vision

__all__ = ["CURVE_ROWS", "SAMPLE_COUNTS", "compare", "curve_file", "score_file", "study", "subsets_of"]

CURVE_ROWS = (
    "average",
    "task_arithmetic",
    "ties",
    "tsv",
    "iso_c",
    "regmean",
    "actmat",
    "actmat_ridge",
    "actmat_bounded",
)
"""Rows of the figure of accuracy against the number of experts, as far as they can run."""

SAMPLE_COUNTS = (1, 4, 16, 64, 320)
"""Images per task of the figure of RegMean's accuracy against what it was given."""


def score_file(cache: Path, suite: str) -> Path:
    """Where the scores of a suite are."""
    return cache / "scores" / f"{suite}.jsonl"


def curve_file(cache: Path, suite: str) -> Path:
    """Where the points of the curves are: merges of subsets, RegMean by number of images."""
    return cache / "scores" / f"{suite}-curves.jsonl"


def compare(vision: Vision, request: RunRequest, *, subsets: int = 0) -> dict[str, str]:
    """References and all rows for every regime that is asked for; scores are added to the files of the suite.

    If `subsets` > 0, also the curves: merges of that many subsets of every size, and RegMean by number of images; and
    how near `D^T D` is to the Gram matrices.

    Returns:
        What was left out, and why.
    """
    left_out: dict[str, str] = {}
    for regime in request.regimes:
        rows, reasons = candidates(request.methods, regime, len(vision.tasks), ("gram", "fisher"))
        left_out |= reasons
        path = score_file(request.cache, request.suite)
        append_scores(path, vision.references(regime))
        append_scores(path, vision.scores(regime, vision.merges(regime, rows)))
        if subsets:
            wanted = [row for row in rows if row.name in CURVE_ROWS]
            path = curve_file(request.cache, request.suite)
            _append(path, _points_of_subsets(vision, regime, wanted, subsets))
            _append(path, _points_of_samples(vision, regime))
            store_estimates(vision, regime, request.cache)
    return left_out


def subsets_of(names: Sequence[str], size: int, n: int, seed: int) -> list[tuple[str, ...]]:
    """At most `n` subsets of a size, drawn without repetition, in the order in which they were drawn."""
    everything = list(combinations(names, size))
    order = torch.randperm(len(everything), generator=generator_for(seed, f"subsets of {size}")).tolist()
    return [everything[i] for i in order[:n]]


def study(request: RunRequest, prepared: Callable[[int, Watch], Vision], splits: int = 2) -> str:
    """The study over all seeds and regimes of a request; see `harness.study_run`.

    Args:
        request: what is asked for.
        prepared: makes the experiment of a seed.
        splits: random cuts of the tasks into halves.

    Returns:
        The tables, in Markdown.
    """
    with Watch(request.console, request.cache / "logs") as watch:
        subjects = (
            _subject(vision, regime)
            for vision in (prepared(seed, watch) for seed in request.seeds)
            for regime in request.regimes
        )
        family = [row.name for row in VARIANTS]
        return run_study(request.suite, request.cache, subjects, splits, family)


def _subject(vision: Vision, regime: Regime) -> Subject:
    def merged(subset: tuple[str, ...]) -> dict[str, Answers]:
        found = vision.merges(regime, (*VARIANTS, *NEIGHBOURS), only=subset, tune=False)
        return {
            row: {"validation": next(iter(result["validation"].values())), "test": result["test"]}
            for row, result in found.items()
        }

    names = tuple(task.name for task in vision.tasks)
    return Subject(regime, vision.seed, names, vision.own_answers(regime), merged)


def _points_of_subsets(vision: Vision, regime: Regime, rows: Sequence[Candidate], n: int) -> Iterator[dict[str, Any]]:
    names = [task.name for task in vision.tasks]
    references = {(s.method, s.task): s.share for s in vision.references(regime)}
    for size in range(2, len(names) + 1):
        for chosen in subsets_of(names, size, n, vision.seed):
            found = vision.merges(regime, rows, only=chosen, tune=False)
            shares = {row: {t: r / n for t, (r, n) in result["test"].items()} for row, result in found.items()}
            shares |= {w: {t: references[w, t] for t in chosen} for w in ("base", "experts")}
            for row, by_task in shares.items():
                yield _identity(vision, regime) | {"curve": "subsets", "method": row, "shares": by_task}


def _points_of_samples(vision: Vision, regime: Regime) -> Iterator[dict[str, Any]]:
    row = Candidate("regmean", "regmean")
    for n in SAMPLE_COUNTS:
        if n <= min(len(task.train) for task in vision.tasks):
            found = vision.merges(regime, [row], tune=False, samples=n)["regmean"]["test"]
            shares = {t: right / total for t, (right, total) in found.items()}
            yield _identity(vision, regime) | {"curve": "samples", "method": "regmean", "samples": n, "shares": shares}


def _identity(vision: Vision, regime: Regime) -> dict[str, Any]:
    return {"model": vision.model, "regime": regime, "seed": vision.seed, "settings": vision.settings}


def _append(path: Path, points: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for point in points:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")
