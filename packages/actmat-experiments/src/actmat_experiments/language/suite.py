"""The suite `language`: T5 on the paper's seven tasks, from a base on the hub or on disk to the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.harness.cache import Cache, file_digest
from actmat_experiments.harness.merging import candidates
from actmat_experiments.harness.processes import placed
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.settings import changed
from actmat_experiments.language.chain import Chain
from actmat_experiments.language.experts import Made
from actmat_experiments.language.measure import KINDS
from actmat_experiments.language.models import load_model, load_tokenizer
from actmat_experiments.language.report import say_left_out, show
from actmat_experiments.language.settings import PaperSettings
from actmat_experiments.language.sources import load_tasks
from actmat_experiments.language.templates import TEMPLATES
from actmat_experiments.paper import NOTES, paper_figures
from actmat_experiments.suites import RunRequest, TableRequest

__all__ = ["MODELS", "prepare_base", "run", "table"]

MODELS = {"T5-base": "google-t5/t5-base", "T5-large": "google-t5/t5-large"}
"""Names in tables -> repositories on the hub; any other folder or hub id can be named instead."""

_REGIMES: tuple[Regime, ...] = ("full", "lora")


def run(request: RunRequest) -> None:
    """Experts, merges and tests of all models, regimes and seeds; see `actmat experiment run`.

    Under `accelerate launch` every process trains its share of the experts on its own GPU, and the first one goes on
    with the merges.

    Raises:
        MergeError: a task, a model, a method or a setting is unknown, or data are missing.
    """
    settings = changed(PaperSettings(), request.settings)
    names = list(request.tasks or TEMPLATES)
    unknown = [f"'{n}' is no task.{did_you_mean(n, TEMPLATES)}" for n in names if n not in TEMPLATES]
    if unknown:
        raise RecipeError(f"The tasks are {', '.join(TEMPLATES)}.", unknown)
    rows = {regime: candidates(request.methods, regime, len(names), KINDS) for regime in request.regimes}
    tasks = load_tasks(names, request.data, cycle=settings.cycle)
    share, device = placed(request.device)
    request = replace(request, device=device)
    with Watch(request.console, request.cache / "logs") as watch:
        for model in request.models or ("T5-base",):
            base = prepare_base(MODELS.get(model, model), Cache(request.cache), watch)
            for regime in request.regimes:
                for seed in request.seeds:
                    chain = Chain(
                        request=request,
                        settings=settings,
                        base=base,
                        tasks=tasks,
                        regime=regime,
                        rows=rows[regime][0],
                        seed=seed,
                        watch=watch,
                        model=model,
                        also={"base": base[1]},
                    )
                    chain.run(share)
    say_left_out(request.console, [left_out for _, left_out in rows.values()])


def prepare_base(source: str, cache: Cache, watch: Watch) -> Made:
    """A local float32 copy of the base with its tokenizer, which experts and merges refer to.

    Args:
        source: folder, known again by its bytes, or hub id, known again by its name: `ORG/NAME`.
        cache: where the copy is kept.
        watch: progress.
    """
    folder = Path(source)
    identity = file_digest(p for p in folder.iterdir() if p.is_file()) if folder.is_dir() else source

    def make(place: Path) -> None:
        with watch.stage(f"base: {folder.name}"):
            model, tokenizer = load_model(source), load_tokenizer(source)
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)

    place = cache.get("base", {"version": 1, "base": identity}, make)
    return place, place.name


def table(request: TableRequest) -> None:
    """The tables of all earlier runs below the cache, the paper's averages beside."""
    show(
        request.suite,
        request.cache,
        request.console or Console(),
        markdown=request.markdown,
        figures={(model, regime): paper_figures(model, regime) for model in MODELS for regime in _REGIMES},
        notes=NOTES["language"],
        skewed=("wikiqa",),
    )
