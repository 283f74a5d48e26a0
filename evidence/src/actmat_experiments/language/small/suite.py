"""The suite `language-small`: a small T5 from its tokenizer on, seven classification tasks, laptop size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from actmat_experiments.harness.cache import Cache, digest, library_versions
from actmat_experiments.harness.experiment import Made
from actmat_experiments.harness.progress import Watch, one_thread_on
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import data_folder, known_names, refuse_flags, run_experiments
from actmat_experiments.language.exams import encode
from actmat_experiments.language.models import load_tokenizer
from actmat_experiments.language.small.pretrain import (
    Architecture,
    Pretraining,
    new_model,
    pretrain,
    sentinels,
    train_tokenizer,
)
from actmat_experiments.language.small.tasks import SMALL_TASKS, SmallData, load_small
from actmat_experiments.language.suite import Language
from actmat_experiments.language.train import ExpertSettings, FineTuning, LanguageSettings

_VERSION = 3
_FULL = FineTuning(
    learning_rate=1e-2,
    optimizer="adafactor",
    batch_size=32,
    piece_tokens=2048,
    max_updates=600,
    validate_every=60,
    patience=4,
    precision="no",
    max_length=48,
    clip=1.0,
)
_LORA = replace(_FULL, learning_rate=3e-3, optimizer="adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallSettings(LanguageSettings):
    """Everything but the seed.

    Args:
        architecture: sizes of the T5.
        pretraining: training of the base.
        n_validation: training rows per task that are kept for choosing settings.
        n_test: test rows per task, the same for all seeds.
    """

    experts: ExpertSettings = field(default_factory=lambda: ExpertSettings(full=_FULL, lora=_LORA))
    together: int = 24
    shuffled: bool = False
    architecture: Architecture = field(default_factory=Architecture)
    pretraining: Pretraining = field(default_factory=Pretraining)
    n_validation: int = 100
    n_test: int = 500


def run(request: RunRequest) -> None:
    """Base, experts, merges and tests of all seeds and regimes; see `run_experiments`.

    Raises:
        MergeError: a task, a method or a setting is unknown, or data are missing.
    """
    _, names, _ = _checked(request)
    with one_thread_on(request.device):
        run_experiments(request, experiments, len(names))


def experiments(request: RunRequest, watch: Watch) -> Iterator[Language]:
    """One for each seed and regime; the base of a seed is made when its first one is asked for."""
    settings, names, folder = _checked(request)
    for seed in request.seeds:
        data = load_small(folder, seed=seed, n_validation=settings.n_validation, n_test=settings.n_test)
        base = _base(data, settings, seed, request.device, Cache(request.cache), watch)
        tasks = [task for task in data.tasks if task.name in names]
        for regime in request.regimes:
            yield Language.of(request, settings, base, tasks, regime=regime, seed=seed, watch=watch)


def _checked(request: RunRequest) -> tuple[SmallSettings, list[str], Path]:
    """Settings, names of the tasks, and the data folder."""
    settings = changed(SmallSettings(), request.settings)
    refuse_flags(request, "models")
    folder = data_folder(request, f"{SMALL_TASKS[0].file}.train.jsonl, ...")
    return settings, known_names(request.tasks, [t.name for t in SMALL_TASKS]), folder


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
        model = new_model(settings.architecture, seed=seed)
        with watch.stage("base", total=chosen.updates) as stage:
            losses = pretrain(
                model, texts, questions, sentinels(tokenizer), chosen, seed=seed, device=device, on_step=stage.advance
            )
        model.cpu().save_pretrained(folder)
        (folder / "training.json").write_text(json.dumps({"loss per token": losses}) + "\n", encoding="utf-8")

    place = cache.get("base", key, make)
    return Made(place, place.name)
