"""The experiments on images: experts behind heads that are frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from actmat.extras.demo.model import Head
from actmat_experiments.harness.experiment import Counts, Experiment, Made
from actmat_experiments.harness.heads import ClipHead, counted, load_head
from actmat_experiments.harness.measuring import Batch
from actmat_experiments.harness.progress import Stage, Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.suite import request_fields
from actmat_experiments.harness.training import Precision, Schedule, Start, Training
from actmat_experiments.vision.backbones import Backbone, features
from actmat_experiments.vision.images import ImageTask
from actmat_experiments.vision.train import finetune

_BATCH = 32
_MOST_BYTES, _MOST_ROWS = 8e9, 16
"""Merged models that lie on the disk at the same time, and that an interruption loses at most."""


@dataclass(frozen=True, kw_only=True)
class Vision(Experiment):
    """The stages after base and heads.

    Args:
        heads: task -> folder of its head, in the cache.
        schedules: regime -> task -> schedule of its expert.
        alpha, start: of LoRA, see `Training`.
        precision: of the forward passes in training.
        test_precision: of the forward passes in tests.
        public: task -> folder of a ready-made expert, in place of full fine-tuning.
        diverging: compare answers to validation images with the expert's, too.
    """

    backbone: Backbone
    tasks: Sequence[ImageTask]
    heads: Mapping[str, Path]
    schedules: Mapping[Regime, Mapping[str, Schedule]]
    rank: int = 16
    alpha: int = 0
    start: Start = "apart"
    precision: Precision = "float32"
    test_precision: Precision = "float32"
    public: Mapping[str, Path] = field(default_factory=dict)
    diverging: bool = False

    def experts(self) -> dict[str, Made]:
        """See `Experiment`."""
        if self.regime == "full" and self.public:
            return {name: Made(self.public[name], self.public[name].name) for name in self.names}
        return super().experts()

    def training(self, task: ImageTask) -> Mapping[str, Any]:
        """See `Experiment`."""
        return {
            "head": self.heads[task.name].name,
            "data": task.content["train"],
            "rank": self.rank if self.regime == "lora" else None,
            "schedule": self.schedules[self.regime][task.name],
            "precision": self.precision,
        } | ({"alpha": self.alpha, "start": self.start} if self.alpha or self.start != "apart" else {})

    def steps(self, task: ImageTask) -> int:
        """See `Experiment`."""
        return self.schedules[self.regime][task.name].steps(len(task.train))

    def train(self, task: ImageTask, out: Path, stage: Stage) -> None:
        """See `Experiment`."""
        schedule = self.schedules[self.regime][task.name]
        lora: dict[str, Any] = {"rank": self.rank, "alpha": self.alpha, "start": self.start}
        how = Training(
            *(task.name, self.seed, schedule, self.regime), device=self.device, precision=self.precision, **lora
        )
        finetune(self.backbone, self.base.path, self.head(task.name), task.train, how, out, stage.advance)

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`."""
        chosen = [t for t in self.tasks if t.name in tasks]
        return [self.test_precision, [[self.heads[t.name].name, *(t.content[p] for p in parts)] for t in chosen]]

    def read(self, folder: Path) -> Any:
        """See `Experiment`."""
        return self.backbone.load(folder)

    def test(self, model: Any, task: str, part: str) -> Counts:
        """See `Experiment`; on validation images also the divergence from the task's expert, see `counted`."""
        examples, head = getattr(self.task(task), part), self.head(task)

        def answers(model: Any) -> Tensor:
            return head(features(self.backbone, model, examples, self.device, self.test_precision))

        own_NC = self.of_expert(task, answers) if self.diverging and part == "validation" else None
        return counted(answers(model), examples.labels_N, own_NC)

    def inputs(self, task: str, n: int) -> Iterator[Batch]:
        """See `Experiment`. As in the paper, few images suffice."""
        for pixels_BSSC in getattr(self.task(task), self.measured).head(n).batches(_BATCH):
            yield {"pixel_values": self.backbone.scale(pixels_BSSC.to(self.device))}

    def logits(self, task: str) -> Callable[[Any, Batch], Tensor]:
        """See `Experiment`."""
        head = self.head(task).to(self.device)
        return lambda running, batch: head(self.backbone.features(running, batch["pixel_values"]))

    def head(self, task: str) -> Head | ClipHead:
        """The frozen head of a task."""
        return load_head(self.heads[task])


def common(request: RunRequest, base: Path, watch: Watch) -> dict[str, Any]:
    """Fields of an experiment that follow from the request and the folder of the base."""
    size = sum(f.stat().st_size for f in base.iterdir() if f.suffix == ".safetensors")
    fields = request_fields(request, watch)
    return {
        **fields,
        "base": Made(base, base.parent.name),
        "testers": fields["threads"] if request.device == "cpu" else None,
        "together": max(1, min(_MOST_ROWS, int(_MOST_BYTES // size))),
    }
