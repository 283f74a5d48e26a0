"""The suite `language-small`: a small T5 from its tokenizer on, seven classification tasks, laptop size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from rich.console import Console

from actmat.demo.merging import Candidate
from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.harness.cache import Cache, digest, library_versions
from actmat_experiments.harness.merging import candidates
from actmat_experiments.harness.processes import one_thread_on, placed
from actmat_experiments.harness.progress import Watch, quiet_libraries
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.study import NEIGHBOURS, VARIANTS
from actmat_experiments.harness.study_run import run_study
from actmat_experiments.language.chain import Chain
from actmat_experiments.language.experts import Made
from actmat_experiments.language.items import TextTask
from actmat_experiments.language.measure import KINDS
from actmat_experiments.language.models import load_tokenizer
from actmat_experiments.language.report import say_left_out, show
from actmat_experiments.language.settings import ExpertSettings, LanguageSettings
from actmat_experiments.language.small.pretrain import Architecture, Pretraining, new_model, pretrain
from actmat_experiments.language.small.tasks import SMALL_TASKS, SmallData, load_small
from actmat_experiments.language.small.tokenizer import sentinels, train_tokenizer
from actmat_experiments.language.subsets import subject
from actmat_experiments.language.tokens import encode
from actmat_experiments.language.train import FineTuning
from actmat_experiments.suites import RunRequest, TableRequest

__all__ = ["SmallSettings", "run", "study", "table"]

_VERSION = 3
_FULL = FineTuning(
    learning_rate=1e-2,
    optimiser="adafactor",
    batch_size=32,
    piece_tokens=2048,
    max_updates=600,
    validate_every=60,
    patience=4,
    precision="no",
    max_length=48,
)
_LORA = replace(_FULL, learning_rate=3e-3, optimiser="adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallSettings(LanguageSettings):
    """Everything but the seed.

    Args:
        architecture: sizes of the T5.
        pretraining: training of the base.
        n_validation: training rows per task that are kept for choosing settings.
        n_test: test rows per task, the same for all seeds.
        splits: of the study: random cuts of the tasks into halves.
    """

    experts: ExpertSettings = field(default_factory=lambda: ExpertSettings(full=_FULL, lora=_LORA))
    together: int = 24
    architecture: Architecture = field(default_factory=Architecture)
    pretraining: Pretraining = field(default_factory=Pretraining)
    n_validation: int = 100
    n_test: int = 500
    splits: int = 2

    def decisive(self) -> Self:
        """See `LanguageSettings`."""
        return replace(LanguageSettings.decisive(self), splits=1)


def run(request: RunRequest) -> None:
    """Base, experts, merges and tests of all regimes and seeds; see `actmat experiment run`.

    Under `accelerate launch` every process trains its share of the experts, and the first one goes on with the merges.

    Raises:
        MergeError: a task, a method or a setting is unknown, or data are missing.
    """
    settings, folder, names = _checked(request)
    rows = {regime: candidates(request.methods, regime, len(names), KINDS) for regime in request.regimes}
    share, device = placed(request.device)
    request = replace(request, device=device)
    with one_thread_on(device), Watch(request.console, request.cache / "logs") as watch:
        for chain in _chains(request, settings, folder, names, {r: chosen for r, (chosen, _) in rows.items()}, watch):
            chain.run(share)
    say_left_out(request.console, [left_out for _, left_out in rows.values()])


def study(request: RunRequest) -> str:
    """Variants of the interference family on subsets of the experts; see `actmat experiment study`.

    Raises:
        MergeError: a task or a setting is unknown, or data are missing.
    """
    settings, folder, names = _checked(request)
    rows, family = (*VARIANTS, *NEIGHBOURS), [row.name for row in VARIANTS]
    with one_thread_on(request.device), Watch(request.console, request.cache / "logs") as watch:
        chains = _chains(request, settings, folder, names, dict.fromkeys(request.regimes, rows), watch)
        subjects = (subject(chain.prepare(), Cache(request.cache), watch) for chain in chains)
        return run_study(request.suite, request.cache, subjects, settings.splits, family)


def _chains(
    request: RunRequest,
    settings: SmallSettings,
    folder: Path,
    names: Sequence[str],
    rows: Mapping[Regime, Sequence[Candidate]],
    watch: Watch,
) -> Iterator[Chain]:
    """One for each seed and regime; the base of a seed is made when its first one is asked for."""
    for seed in request.seeds:
        base, tasks = _prepared(request, settings, folder, names, seed, watch)
        for regime in request.regimes:
            yield Chain(
                request=request,
                settings=settings,
                base=base,
                tasks=tasks,
                regime=regime,
                rows=rows[regime],
                seed=seed,
                watch=watch,
            )


def _checked(request: RunRequest) -> tuple[SmallSettings, Path, list[str]]:
    """Settings, folder of the data and names of the tasks."""
    settings = changed(SmallSettings(), request.settings)
    known = [t.name for t in SMALL_TASKS]
    names = list(request.tasks or known)
    unknown = [f"'{n}' is no task.{did_you_mean(n, known)}" for n in names if n not in known]
    if unknown:
        raise RecipeError(f"The tasks are {', '.join(known)}.", unknown)
    if request.models:
        raise RecipeError(f"{request.suite} trains its own base: leave --models out.")
    if request.data is None:
        raise RecipeError(
            f"{request.suite} needs local data: --data FOLDER with {SMALL_TASKS[0].file}.train.jsonl, ..."
        )
    return settings, request.data, names


def _prepared(
    request: RunRequest, settings: SmallSettings, folder: Path, names: Sequence[str], seed: int, watch: Watch
) -> tuple[Made, list[TextTask]]:
    """The base of a seed, and the tasks that are asked for."""
    data = load_small(folder, seed=seed, n_validation=settings.n_validation, n_test=settings.n_test)
    base = _base(data, settings, seed, request.device, Cache(request.cache), watch)
    return base, [task for task in data.tasks if task.name in names]


def _base(data: SmallData, settings: SmallSettings, seed: int, device: str, cache: Cache, watch: Watch) -> Made:
    """Tokenizer and base, trained now unless they are in the cache."""
    key = {
        "version": _VERSION,
        "architecture": settings.architecture,
        "pretraining": settings.pretraining,
        "corpus": digest(data.corpus),
        "tasks": [task.key("train") for task in data.tasks],
        "seed": seed,
        "device": device.split(":")[0],
        "libraries": library_versions("torch", "transformers", "tokenizers"),
    }

    def make(folder: Path) -> None:
        with watch.stage("tokenizer"):
            train_tokenizer(data.corpus, settings.architecture.vocabulary, folder)
        tokenizer, chosen = load_tokenizer(folder), settings.pretraining
        texts = tokenizer(list(data.corpus), add_special_tokens=False)["input_ids"]
        questions = [
            item
            for task in data.tasks
            for item in encode(tokenizer, task.train[: chosen.supervised_items], max_length=chosen.max_length)
        ]
        quiet_libraries()
        model = new_model(settings.architecture, seed=seed)
        with watch.stage("base", total=chosen.updates) as stage:
            losses = pretrain(
                model, texts, questions, sentinels(tokenizer), chosen, seed=seed, device=device, on_step=stage.advance
            )
        model.cpu().save_pretrained(folder)
        (folder / "training.json").write_text(json.dumps({"loss per token": losses}) + "\n", encoding="utf-8")

    place = cache.get("base", key, make)
    return place, place.name


def table(request: TableRequest) -> None:
    """The tables of all earlier runs below the cache."""
    show(request.suite, request.cache, request.console or Console(), markdown=request.markdown)
