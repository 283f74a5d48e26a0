"""The suite `language`, T5 on the paper's seven tasks, and the experiment that both language suites run.

Experts answer questions with several choices and are tested by rank classification.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.harness.cache import Cache, digest
from actmat_experiments.harness.experiment import Counts, Experiment, Made, Share
from actmat_experiments.harness.hub import model_folder
from actmat_experiments.harness.merging import KINDS, rescaled
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.report import show
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import run_experiments
from actmat_experiments.language.exams import Exam, examine, make_exams
from actmat_experiments.language.models import load_model, load_tokenizer, measure
from actmat_experiments.language.questions import FORMS, TextTask
from actmat_experiments.language.sources import load_tasks
from actmat_experiments.language.train import LanguageSettings, PaperSettings, expert_key, train_expert
from actmat_experiments.suites import RunRequest, TableRequest

_SHUFFLE = 4
"""Seed of the paper's code for the order of the items, of which statistics see the first ones."""


@dataclass(frozen=True, kw_only=True)
class Language(Experiment):
    """One family of T5 experts.

    Args:
        exams: task -> its items in token ids.
    """

    settings: LanguageSettings
    exams: Mapping[str, Exam]

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
        tests = [exam.key("test") for exam in exams.values()]
        also = {"base": base.digest} if model else None
        return cls(
            suite=request.suite,
            model=model,
            regime=regime,
            seed=seed,
            digest=digest({"settings": settings.decisive(), "also": also, "tests": tests}),
            base=base,
            cache=Cache(request.cache),
            watch=watch,
            device=request.device,
            threads=request.threads,
            together=settings.together,
            keep=settings.keep,
            samples=settings.samples,
            measured=settings.measured,
            settings=settings,
            exams=exams,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """See `Experiment`."""
        return tuple(self.exams)

    def experts(self, share: Share = (0, 1)) -> dict[str, Made]:
        """See `Experiment`. An interrupted one goes on from its last validation."""
        experts, found = self.settings.experts, {}
        for name in self.names[share[0] :: share[1]]:
            exam = self.exams[name]
            key = expert_key(self.base.digest, exam, self.regime, experts, self.seed, self.device)

            def make(folder: Path, exam: Exam = exam) -> None:
                train_expert(
                    *(self.base.path, exam, self.regime, experts),
                    seed=self.seed,
                    device=self.device,
                    folder=folder,
                    watch=self.watch,
                )

            place = self.cache.get("experts", key, make, resumable=True)
            found[name] = Made(place, place.name)
        return found

    def measure(
        self, task: str, expert: Path, n: int, out: Path, advance: Callable[[float], None], kinds: Sequence[str] = KINDS
    ) -> None:
        """See `Experiment`."""
        exam = self.exams[task]
        items = list(getattr(exam, self.measured))
        if isinstance(self.settings, PaperSettings):
            random.Random(_SHUFFLE).shuffle(items)
        measure(
            *(self.base.path, expert, items[:n], out),
            source=task,
            seed=self.seed,
            device=self.device,
            advance=advance,
            fisher="fisher" in kinds,
        )

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`."""
        return [self.exams[name].key(*parts) for name in tasks]

    def load(self, folder: Path) -> Any:
        """See `Experiment`."""
        return load_model(self.base.path, folder, device=self.device)

    def at_scales(self, folder: Path, acted: Sequence[str]) -> Callable[[float], Any]:
        """See `Experiment`."""
        model = self.load(folder)
        end = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        start = load_model(self.base.path, device=self.device).state_dict()

        def at(scale: float) -> Any:
            with torch.no_grad():
                model.load_state_dict(rescaled(start, end, acted, scale))
            return model

        return at

    def test(self, model: Any, task: str, part: str) -> Counts:
        """See `Experiment`."""
        return examine(model, getattr(self.exams[task], part))

    def majority(self) -> dict[str, Counts]:
        """See `Experiment`."""
        found: dict[str, Counts] = {}
        for name, exam in self.exams.items():
            correct, total = exam.task.majority
            balanced = 1 / len({item.label for item in exam.test})
            found[name] = {"correct": correct, "total": total, "balanced": balanced}
        return found


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
    settings = changed(PaperSettings(), request.settings)
    names = list(request.tasks or FORMS)
    unknown = [f"'{n}' is no task.{did_you_mean(n, FORMS)}" for n in names if n not in FORMS]
    if unknown:
        raise RecipeError(f"The tasks are {', '.join(FORMS)}.", unknown)

    def experiments(request: RunRequest, watch: Watch) -> Iterator[Language]:
        tasks = load_tasks(names, request.data, asking=settings.asking)
        watch.note(f"left out: {line}" for task in tasks for line in task.malformed)
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
        source: folder, known again by its bytes, or hub id `ORG/NAME[@REVISION]`, known again by its commit.
    """
    folder, identity = model_folder(source)

    def make(place: Path) -> None:
        with watch.stage(f"base: {source}"):
            model, tokenizer = load_model(folder), load_tokenizer(folder)
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)

    place = cache.get("base", {"version": 2, "base": identity}, make)
    return Made(place, place.name)


def table(request: TableRequest) -> None:
    """The tables of all earlier runs below the cache, the paper's averages beside."""
    show(request, skewed=("wikiqa",))
