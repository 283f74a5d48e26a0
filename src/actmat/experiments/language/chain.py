"""From a base and tasks to scores, for one regime and seed: experts, statistics, merges, tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actmat.experiments.harness.cache import Cache, digest
from actmat.experiments.harness.merging import Candidate
from actmat.experiments.harness.progress import Watch
from actmat.experiments.harness.results import Regime
from actmat.experiments.language.compare import Setup, compare
from actmat.experiments.language.exams import Exam, make_exams
from actmat.experiments.language.experts import Made, train_experts
from actmat.experiments.language.items import TextTask
from actmat.experiments.language.measure import measure_experts, needs_statistics
from actmat.experiments.language.models import load_tokenizer
from actmat.experiments.language.report import score_file
from actmat.experiments.language.settings import LanguageSettings
from actmat.experiments.suites import RunRequest

__all__ = ["prepare", "run_one"]


def run_one(
    request: RunRequest,
    settings: LanguageSettings,
    base: Made,
    tasks: Sequence[TextTask],
    regime: Regime,
    rows: Sequence[Candidate],
    *,
    seed: int,
    watch: Watch,
    model: str = "",
    also: Any = None,
    share: tuple[int, int] | None = None,
) -> None:
    """Train, measure, merge, test; scores are added to the suite's file as they become known.

    Args:
        request, settings, base, tasks, regime, rows, seed, watch, model, also: see `prepare`.
        share: number of this process and how many there are: it first trains its share of the experts, and only the
            first process goes on when all are there.
    """
    if share is not None:
        process, n_processes = share
        mine = tasks[process::n_processes]
        _experts(request, settings, base, _exams(settings, base, mine, regime), regime, seed=seed, watch=watch)
        if process:
            return
    setup = prepare(*(request, settings, base, tasks, regime, rows), seed=seed, watch=watch, model=model, also=also)
    compare(setup, Cache(request.cache), watch, score_file(request.cache, request.suite))


def prepare(
    request: RunRequest,
    settings: LanguageSettings,
    base: Made,
    tasks: Sequence[TextTask],
    regime: Regime,
    rows: Sequence[Candidate],
    *,
    seed: int,
    watch: Watch,
    model: str = "",
    also: Any = None,
) -> Setup:
    """Everything up to the merges: experts, and statistics where a row needs them.

    Args:
        request: what was asked for.
        settings: of the suite.
        base: checkpoint that the experts start from.
        tasks: one expert each.
        regime: how they are trained.
        rows: what is to be merged.
        seed: of the run.
        watch: progress.
        model: name of the base in tables.
        also: what else decided the numbers, beside settings and test items: part of the digest in every score.
    """
    exams = _exams(settings, base, tasks, regime)
    experts = _experts(request, settings, base, exams, regime, seed=seed, watch=watch)
    statistics = measure_experts(
        *(base, experts if needs_statistics(rows) else {}, exams),
        samples=settings.samples,
        seed=seed,
        device=request.device,
        cache=Cache(request.cache),
        watch=watch,
    )
    key = {"settings": settings.decisive(), "also": also, "tests": [exam.key("test") for exam in exams.values()]}
    return Setup(
        suite=request.suite,
        model=model,
        regime=regime,
        seed=seed,
        settings=digest(key),
        base=base,
        experts=experts,
        exams=exams,
        rows=rows,
        statistics=statistics,
        together=settings.together,
        keep=settings.keep,
        threads=request.threads,
        device=request.device,
    )


def _exams(settings: LanguageSettings, base: Made, tasks: Sequence[TextTask], regime: Regime) -> dict[str, Exam]:
    return make_exams(load_tokenizer(base[0]), tasks, max_length=settings.experts.of(regime).max_length)


def _experts(
    request: RunRequest,
    settings: LanguageSettings,
    base: Made,
    exams: Mapping[str, Exam],
    regime: Regime,
    *,
    seed: int,
    watch: Watch,
) -> dict[str, Made]:
    return train_experts(
        *(base, exams, regime, settings.experts),
        seed=seed,
        device=request.device,
        cache=Cache(request.cache),
        watch=watch,
    )
