"""Rows and runs that the suites on pretrained models share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.harness.cache import digest
from actmat_experiments.harness.experiment import Experiment
from actmat_experiments.harness.merging import KINDS, Candidate, needs_statistics
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.rows import more_rows
from actmat_experiments.harness.suite import Experiments, run_experiments, score_file
from actmat_experiments.harness.training import Schedule
from actmat_experiments.pretrained.gram import gram_file, store_gram
from actmat_experiments.pretrained.staged import REGMEAN_PP, HasInputs, staged_inputs
from actmat_experiments.suites import RunRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCALES = (0.5, 1.0, 2.0)
"""Factors of the merged delta that tuning tries."""

ROWS = (
    *("average", "task_arithmetic", "ties", "tsv", "iso_c", "actmat", "actmat_ridge", "regmean"),
    *("wudi", "swudi", "aswudi", "cart", "dc_merge", "knots"),
    *("iso_cts", "sce", "model_stock", "karcher", "dare", "della", "breadcrumbs", "cat", "lot", "fisher"),
)
"""Rows that are compared unless a request names others."""

TOGETHER = 3
"""Models merged in one reading, and lost at most by an interruption."""

ENCODER = "encoder"
"""Folder of the base in its stage of the cache."""


def copy_model(folder: Path, out: Path) -> None:
    """Copy config, weights and tokenizer of a model into `out/encoder`."""
    (out / ENCODER).mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt", ".safetensors"):
            shutil.copyfile(path, out / ENCODER / path.name)


def schedule_of(settings: Any, regime: Regime) -> Schedule:
    """Training of an expert of a regime, by `epochs`, `rate`, `lora_epochs`, `lora_rate` and `batch_size`."""
    if regime == "full":
        return Schedule(settings.epochs, settings.batch_size, settings.rate)
    return Schedule(settings.lora_epochs, settings.batch_size, settings.lora_rate)


def variants(request: RunRequest, settings: Any, model: str) -> Iterator[dict[str, Any]]:
    """Fields of one experiment for each seed and regime, for LoRA one for each rank.

    Args:
        settings: of a suite, with `ranks`, `samples` and `scales`.
        model: name of the base.
    """
    for seed in request.seeds:
        for regime in request.regimes:
            for rank in settings.ranks if regime == "lora" else (0,):
                yield {
                    "seed": seed,
                    "regime": regime,
                    "rank": rank,
                    "model": f"{model}, r = {rank}" if rank else model,
                    "samples": settings.samples,
                    "scales": settings.scales,
                    "one_merge": True,
                    "together": TOGETHER,
                }


def settings_digest(settings: DataclassInstance, base: str, tasks: Sequence[Any]) -> str:
    """Stands for all but seed, regime, row, and the rank and `alpha` of LoRA, which are in the name of the model.

    Args:
        base: its digest.
        tasks: each has a `name` and the hashes of its parts, `content`.
    """
    plain = {n: v for n, v in asdict(settings).items() if n not in ("base", "ranks", "mixed", "alpha")}
    return digest([plain, base, [[t.name, t.content] for t in tasks]])


def chosen_tasks(
    request: RunRequest, known: Sequence[str], base: str, *, more: Sequence[str] = (), takes_data: bool = True
) -> list[str]:
    """The names of the tasks that a request asks for; the known ones, if it names none.

    Args:
        base: what kind of model `--set base` takes.
        more: tasks that are run only for a request that names them.
        takes_data: whether the suite reads a data folder.

    Raises:
        RecipeError: there is no such task, or the request names models, or data that the suite does not take.
    """
    if request.data is not None and not takes_data:
        raise RecipeError(f"The suite {request.suite} draws its tasks itself: leave out --data.")
    if request.models:
        raise RecipeError(f"The suite {request.suite} has one base; --set base=FOLDER gives another {base}.")
    names, every = list(request.tasks or known), [*known, *more]
    if unknown := [f"'{n}' is no task.{did_you_mean(n, every)}" for n in names if n not in every]:
        raise RecipeError(f"The tasks are {', '.join(every)}.", unknown)
    return names


def run_pretrained(
    request: RunRequest,
    experiments: Experiments,
    n_tasks: int,
    rows: Sequence[str] = ROWS,
    kinds: Sequence[str] = KINDS,
) -> None:
    """See `run_experiments`; a request that names no rows gets `rows`, those of `more_rows`, and `regmean++` where the
    suite gives the inputs of its statistics.
    """
    wanted = request.methods
    if wanted is None:
        named = dict.fromkeys(row.name for regime in request.regimes for row in more_rows(regime))
        rules: tuple[str, ...] = (*rows, *named)
    else:
        rules = tuple(name for name in wanted if name != REGMEAN_PP.name)

    def more(experiment: Experiment, rows: Sequence[Candidate]) -> None:
        if needs_statistics(rows):
            store_gram(experiment, gram_file(request.cache, request.suite))
        if (wanted is None or REGMEAN_PP.name in wanted) and isinstance(experiment, HasInputs):
            given = staged_inputs(experiment, experiment)
            experiment.compare([REGMEAN_PP], score_file(request.cache, request.suite), given)

    run_experiments(replace(request, methods=rules), experiments, n_tasks, more, kinds)
