"""The suite `language`: T5 on the paper's seven tasks, from a base on the hub or on disk to the tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.harness.cache import Cache, file_digest
from actmat_experiments.harness.experiment import Made
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.report import show
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import run_experiments
from actmat_experiments.language.experiment import Language
from actmat_experiments.language.models import load_model, load_tokenizer
from actmat_experiments.language.questions import TEMPLATES
from actmat_experiments.language.sources import load_tasks
from actmat_experiments.language.train import PaperSettings
from actmat_experiments.suites import RunRequest, TableRequest

__all__ = ["MODELS", "prepare_base", "run", "table"]

MODELS = {"T5-base": "google-t5/t5-base", "T5-large": "google-t5/t5-large"}
"""Names in tables -> repositories on the hub; any other folder or hub id can be named instead."""


def run(request: RunRequest) -> None:
    """Experts, merges and tests of all models, seeds and regimes; see `run_experiments`.

    Raises:
        MergeError: a task, a model, a method or a setting is unknown, or data are missing.
    """
    settings = changed(PaperSettings(), request.settings)
    names = list(request.tasks or TEMPLATES)
    unknown = [f"'{n}' is no task.{did_you_mean(n, TEMPLATES)}" for n in names if n not in TEMPLATES]
    if unknown:
        raise RecipeError(f"The tasks are {', '.join(TEMPLATES)}.", unknown)

    def experiments(request: RunRequest, watch: Watch) -> Iterator[Language]:
        tasks = load_tasks(names, request.data, cycle=settings.cycle)
        for model in request.models or ("T5-base",):
            base = prepare_base(MODELS.get(model, model), Cache(request.cache), watch)
            for seed in request.seeds:
                for regime in request.regimes:
                    yield Language.of(
                        *(request, settings, base, tasks),
                        regime=regime,
                        seed=seed,
                        watch=watch,
                        model=model,
                    )

    run_experiments(request, experiments, len(names))


def prepare_base(source: str, cache: Cache, watch: Watch) -> Made:
    """A local float32 copy of the base with its tokenizer, which experts and merges refer to.

    Args:
        source: folder, known again by its bytes, or hub id, known again by its name: `ORG/NAME`.
    """
    folder = Path(source)
    identity = file_digest(p for p in folder.iterdir() if p.is_file()) if folder.is_dir() else source

    def make(place: Path) -> None:
        with watch.stage(f"base: {folder.name}"):
            model, tokenizer = load_model(source), load_tokenizer(source)
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)

    place = cache.get("base", {"version": 1, "base": identity}, make)
    return Made(place, place.name)


def table(request: TableRequest) -> None:
    """The tables of all earlier runs below the cache, the paper's averages beside."""
    show(request, skewed=("wikiqa",))
