"""The experiments of both vision suites: experts on images, behind heads that are frozen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from actmat.extras.demo.model import Head
from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.cache import Cache, library_versions
from actmat_experiments.harness.experiment import Counts, Experiment, Made, Share
from actmat_experiments.harness.measuring import measure_classifier
from actmat_experiments.harness.merging import KINDS, rescaled
from actmat_experiments.harness.progress import Stage, Watch, one_thread_on
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.training import Schedule, side_by_side
from actmat_experiments.suites import RunRequest
from actmat_experiments.vision.backbones import (
    Backbone,
    ClipHead,
    Precision,
    load_expert,
    load_head,
    read_tensors,
    right_answers,
)
from actmat_experiments.vision.images import ImageTask
from actmat_experiments.vision.train import Training, finetune

_EXPERT_VERSION = 1
_BATCH = 32
_MOST_BYTES, _MOST_ROWS = 8e9, 16
"""Merged models that lie on the disk at the same time, and that an interruption loses at most."""
_MOST_TESTED = 6e9
"""Bytes of models that lie on the accelerator at the same time, to be tested on the same images."""


@dataclass(frozen=True, kw_only=True)
class Vision(Experiment):
    """The stages after base and heads.

    Args:
        heads: task -> folder of its head, in the cache.
        schedules: regime -> task -> schedule of its expert.
        precision: of the forward passes in training.
        test_precision: of the forward passes in tests.
        public: task -> folder of a ready-made expert, in place of full fine-tuning.
    """

    backbone: Backbone
    tasks: Sequence[ImageTask]
    heads: Mapping[str, Path]
    schedules: Mapping[Regime, Mapping[str, Schedule]]
    rank: int = 16
    precision: Precision = "float32"
    test_precision: Precision = "float32"
    public: Mapping[str, Path] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """See `Experiment`."""
        return tuple(task.name for task in self.tasks)

    def experts(self, share: Share = (0, 1)) -> dict[str, Made]:
        """See `Experiment`."""
        wanted = self.tasks[share[0] :: share[1]]
        if self.regime == "full" and self.public:
            return {task.name: Made(self.public[task.name], self.public[task.name].name) for task in wanted}
        keys = {task.name: self._expert_key(task) for task in wanted}
        left = [t for t in wanted if not self.cache.holds("expert", keys[t.name])]
        if left:
            total = sum(self.schedules[self.regime][t.name].steps(len(t.train)) for t in left)
            with self.watch.stage(f"experts: {self.regime}, seed {self.seed}", total=total) as stage:
                stage.log(f"to train: {', '.join(t.name for t in left)}")
                with one_thread_on(self.device):
                    side_by_side(lambda task: self._expert(task, stage), left, self.testers or 1)
        places = {name: self.cache.path("expert", key) for name, key in keys.items()}
        return {name: Made(place, place.name) for name, place in places.items()}

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`."""
        chosen = [t for t in self.tasks if t.name in tasks]
        return [self.test_precision, [[self.heads[t.name].name, *(t.content[p] for p in parts)] for t in chosen]]

    def load(self, folder: Path) -> Any:
        """See `Experiment`."""
        return load_expert(self.backbone.load, self.base.path, folder)

    def at_scales(self, folder: Path, acted: Sequence[str]) -> Callable[[float], Any]:
        """See `Experiment`."""
        start, end = read_tensors(self.base.path), read_tensors(folder)
        return lambda scale: self.backbone.from_tensors(self.base.path, rescaled(start, end, acted, scale))

    def test(self, model: Any, task: str, part: str) -> Counts:
        """See `Experiment`."""
        return self.test_all([model], task, part)[0]

    def test_all(self, models: Sequence[Any], task: str, part: str) -> list[Counts]:
        """See `Experiment`; the images are read once for all models."""
        examples = getattr(self._task(task), part)
        return [*right_answers(self.backbone, models, self._head(task), examples, self.device, self.test_precision)]

    def majority(self) -> dict[str, Counts]:
        """See `Experiment`."""
        return {t.name: dict(zip(("correct", "total"), t.majority, strict=True)) for t in self.tasks}

    def inputs(self, task: str, n: int) -> Iterator[dict[str, Tensor]]:
        """Batches of the first `n` images that statistics are measured on."""
        for pixels_BSSC in getattr(self._task(task), self.measured).head(n).batches(_BATCH):
            yield {"pixel_values": self.backbone.scale(pixels_BSSC.to(self.device))}

    def measure(
        self, task: str, expert: Path, n: int, out: Path, advance: Callable[[float], None], kinds: Sequence[str] = KINDS
    ) -> None:
        """See `Experiment`.

        As in the paper, few images suffice.
        """
        head = self._head(task).to(self.device)

        def batches() -> Iterator[dict[str, Tensor]]:
            for batch in self.inputs(task, n):
                yield batch
                advance(len(batch["pixel_values"]))

        measure_classifier(
            self.backbone.load,
            lambda running, batch: head(self.backbone.features(running, batch["pixel_values"])),
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

    def _task(self, name: str) -> ImageTask:
        return next(task for task in self.tasks if task.name == name)

    def _head(self, task: str) -> Head | ClipHead:
        return load_head(self.heads[task] / "head.safetensors")

    def _expert(self, task: ImageTask, stage: Stage) -> Path:
        schedule = self.schedules[self.regime][task.name]
        how = Training(task.name, self.seed, schedule, self.regime, self.rank, self.device, self.precision)

        def train(out: Path) -> None:
            stage.say(task.name)
            finetune(self.backbone, self.base.path, self._head(task.name), task.train, how, out, stage.advance)
            stage.log(f"{task.name}: {schedule.steps(len(task.train))} steps")

        return self.cache.get("expert", self._expert_key(task), train, resumable=True)

    def _expert_key(self, task: ImageTask) -> dict[str, Any]:
        return {
            "version": _EXPERT_VERSION,
            "base": self.base.digest,
            "head": self.heads[task.name].name,
            "data": task.content["train"],
            "task": task.name,
            "regime": self.regime,
            "rank": self.rank if self.regime == "lora" else None,
            "schedule": self.schedules[self.regime][task.name],
            "precision": self.precision,
            "device": self.device.split(":")[0],
            "seed": self.seed,
            "libraries": library_versions("torch", "transformers", "peft"),
        }


def common(request: RunRequest, base: Path, cache: Cache, watch: Watch) -> dict[str, Any]:
    """Fields of an experiment that follow from the request and the folder of the base."""
    size = sum(f.stat().st_size for f in base.iterdir() if f.suffix == ".safetensors")
    threads = request.threads or os.cpu_count() or 1
    return {
        "suite": request.suite,
        "base": Made(base, base.parent.name),
        "cache": cache,
        "watch": watch,
        "device": request.device,
        "threads": threads,
        "testers": threads if request.device == "cpu" else None,
        "at_once": max(1, min(_MOST_ROWS, int(_MOST_TESTED // size))),
        "together": max(1, min(_MOST_ROWS, int(_MOST_BYTES // (2 * size)))),
    }
