"""The suite `language`, T5 on the paper's seven tasks, and the experiment that both language suites run.

Experts answer questions with several choices and are tested by rank classification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.harness.cache import Cache, digest, file_digest
from actmat_experiments.harness.experiment import Counts, Experiment, Made, Share
from actmat_experiments.harness.merging import rescaled
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.report import show
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import run_experiments
from actmat_experiments.language.exams import Exam, examine, make_exams
from actmat_experiments.language.models import load_model, load_tokenizer, measure
from actmat_experiments.language.questions import TEMPLATES, TextTask
from actmat_experiments.language.sources import load_tasks
from actmat_experiments.language.train import LanguageSettings, PaperSettings, expert_key, train_expert
from actmat_experiments.suites import RunRequest, TableRequest

__all__ = ["MODELS", "Language", "run", "table"]


_VERSION = 1


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

    def measure(self, task: str, expert: Path, n: int, out: Path, advance: Callable[[float], None]) -> None:
        """See `Experiment`."""
        exam = self.exams[task]
        measure(self.base.path, expert, exam, out, samples=n, seed=self.seed, device=self.device, advance=advance)

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
