"""The suite `language`, T5 on the paper's seven tasks, and the experiment that both language suites run.

Experts answer questions with several choices and are tested by rank classification.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from actmat_experiments.harness.cache import Cache, digest
from actmat_experiments.harness.experiment import Counts, Experiment, Made
from actmat_experiments.harness.hub import model_folder
from actmat_experiments.harness.measuring import Batch
from actmat_experiments.harness.progress import Stage, Watch
from actmat_experiments.harness.report import show
from actmat_experiments.harness.request import RunRequest, TableRequest
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import known_names, request_fields, run_experiments
from actmat_experiments.language.exams import Exam, examine, make_exams, training_tensors
from actmat_experiments.language.models import load_t5, load_tokenizer
from actmat_experiments.language.questions import FORMS, TextTask
from actmat_experiments.language.sources import load_tasks
from actmat_experiments.language.train import LanguageSettings, train_expert

_BATCH = 32
_SHUFFLE = 4
"""Seed of the paper's code for the order of the items, of which statistics see the first ones."""


@dataclass(frozen=True, kw_only=True)
class Language(Experiment):
    """One family of T5 experts; its tasks are in token ids."""

    settings: LanguageSettings
    tasks: Sequence[Exam]

    @classmethod
    def of(
        cls,
        request: RunRequest,
        settings: LanguageSettings,
        base: Made,
        tasks: Sequence[TextTask],
        *,
        regime: Regime,
        seed: int,
        watch: Watch,
        model: str = "",
    ) -> Self:
        """The experiment of a request; `model` is the name of the base in tables, where a suite has several."""
        exams = make_exams(load_tokenizer(base.path), tasks, max_length=settings.experts.of(regime).max_length)
        tests, also = [exam.key("test") for exam in exams], {"base": base.digest} if model else None
        return cls(
            **request_fields(request, watch),
            model=model,
            regime=regime,
            seed=seed,
            digest=digest({"settings": settings.decisive(), "also": also, "tests": tests}),
            base=base,
            together=settings.together,
            keep=settings.keep,
            samples=settings.samples,
            measured=settings.measured,
            settings=settings,
            tasks=exams,
        )

    def training(self, task: Exam) -> Mapping[str, Any]:
        """See `Experiment`."""
        experts, lora = self.settings.experts, self.regime == "lora"
        return {
            "data": task.key("train", "validation"),
            "training": experts.of(self.regime),
            "lora": {"rank": experts.rank, "alpha": experts.alpha} if lora else None,
        }

    def steps(self, task: Exam) -> int:
        """See `Experiment`: at most."""
        return self.settings.experts.of(self.regime).max_updates

    def train(self, task: Exam, out: Path, stage: Stage) -> None:
        """See `Experiment`. An interrupted one goes on from its last validation."""
        where: dict[str, Any] = {"seed": self.seed, "device": self.device, "folder": out, "stage": stage}
        train_expert(self.base.path, task, self.regime, self.settings.experts, **where)

    def inputs(self, task: str, n: int) -> Iterator[Batch]:
        """See `Experiment`: items with their right answers."""
        items = list(getattr(self.task(task), self.measured))
        if self.settings.shuffled:
            random.Random(_SHUFFLE).shuffle(items)
        for start in range(0, n, _BATCH):
            if some := items[start : min(n, start + _BATCH)]:
                yield {name: tensor.to(self.device) for name, tensor in training_tensors(some, self._pad).items()}

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`."""
        return [self.task(name).key(*parts) for name in tasks]

    def read(self, folder: Path) -> Any:
        """See `Experiment`."""
        return load_t5(folder).to(self.device)

    def test(self, model: Any, task: str, part: str) -> Counts:
        """See `Experiment`."""
        return examine(model, getattr(self.task(task), part))

    def majority(self) -> dict[str, Counts]:
        """See `Experiment`."""
        balanced = {exam.name: 1 / len({item.label for item in exam.test}) for exam in self.tasks}
        return {name: {**counts, "balanced": balanced[name]} for name, counts in super().majority().items()}

    @property
    def _pad(self) -> int:
        pad: int = json.loads((self.base.path / "config.json").read_text(encoding="utf-8"))["pad_token_id"]
        return pad


MODELS = {
    "T5-base": "google-t5/t5-base@a9723ea7f1b39c1eae772870f3b547bf6ef7e6c1",
    "T5-large": "google-t5/t5-large@150ebc2c4b72291e770f58e6057481c8d2ed331a",
}
"""Names in tables -> repositories on the hub, at the last commits of their main branches; any other folder or hub id
can be named instead."""


def run(request: RunRequest) -> None:
    """Experts, merges and tests of all models, seeds and regimes; see `run_experiments`.

    Raises:
        MergeError: a task, a model, a method or a setting is unknown, or data are missing.
    """
    settings = changed(LanguageSettings(), request.settings)
    names = known_names(request.tasks, FORMS)

    def experiments(request: RunRequest, watch: Watch) -> Iterator[Language]:
        tasks = load_tasks(names, request.data)
        watch.note(f"left out: {line}" for task in tasks for line in task.malformed)
        for model in request.models or ("T5-base",):
            base = prepare_base(MODELS.get(model, model), Cache(request.cache), watch)
            for seed in request.seeds:
                for regime in request.regimes:
                    how: dict[str, Any] = {"regime": regime, "seed": seed, "watch": watch, "model": model}
                    yield Language.of(request, settings, base, tasks, **how)

    run_experiments(request, experiments, len(names))


def prepare_base(source: str, cache: Cache, watch: Watch) -> Made:
    """A local float32 copy of the base with its tokenizer, which experts and merges refer to.

    Args:
        source: folder, known again by its bytes, or hub id `ORG/NAME[@REVISION]`, known again by its commit.
    """
    folder, identity = model_folder(source)

    def make(place: Path) -> None:
        with watch.stage(f"base: {source}"):
            model, tokenizer = load_t5(folder), load_tokenizer(folder)
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)

    place = cache.get("base", {"version": 2, "base": identity}, make)
    return Made(place, place.name)


def table(request: TableRequest) -> None:
    """The tables of all earlier runs below the cache, with the paper's averages."""
    show(request, skewed=("wikiqa",))
