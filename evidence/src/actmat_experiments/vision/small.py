"""`vision-small`: the vision experiments on a laptop. A ViT of 32 x 32 pixels is pretrained on CIFAR-100; experts of at
least seven other tasks are merged. Local data, see `sources`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from actmat_experiments.harness.cache import Cache, digest, library_versions
from actmat_experiments.harness.heads import fitted_head
from actmat_experiments.harness.progress import Watch, one_thread_on
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import data_folder, refuse_flags, run_experiments
from actmat_experiments.harness.training import Schedule
from actmat_experiments.vision.backbones import PLAIN_SCALE, Backbone, features
from actmat_experiments.vision.experiment import Vision, common
from actmat_experiments.vision.images import ImageTask, Limits, local_task, prepare_task
from actmat_experiments.vision.train import VitSizes, pretrain

TASKS = ("mnist", "eurosat", "gtsrb", "dtd10", "sign_digits", "usps", "cifar10")
_BASE_TASK = "cifar100"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class SmallSettings:
    """Settings of the suite, for `--set name=value`.

    Args:
        train, validation, test: largest number of examples per task.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, patch_size: of the ViT.
        base_epochs, base_rate: pretraining.
        epochs, rate, lora_epochs, lora_rate: fine-tuning; the same for all tasks.
        batch_size: of all runs.
        rank: of LoRA.
        ridge, logit_scale: of the heads, see `actmat.extras.demo.model`.
        samples: training images per task that statistics are measured on.
    """

    train: int = 2000
    validation: int = 200
    test: int = 1000
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    patch_size: int = 8
    base_epochs: int = 60
    base_rate: float = 1e-3
    epochs: int = 10
    rate: float = 1e-4
    lora_epochs: int = 10
    lora_rate: float = 1e-3
    batch_size: int = 64
    rank: int = 16
    ridge: float = 0.1
    logit_scale: float = 10.0
    samples: int = 320

    @property
    def sizes(self) -> VitSizes:
        """Of the encoder."""
        return VitSizes(**{f.name: getattr(self, f.name) for f in fields(VitSizes)})


def run(request: RunRequest) -> None:
    """See `suites.Suite`; regimes, seeds and tasks are those of the request.

    Raises:
        RecipeError: no data folder was given, or a setting cannot be.
        CheckpointError: the folder lacks a task.
    """
    run_experiments(request, experiments, len(request.tasks or TASKS))


def experiments(request: RunRequest, watch: Watch) -> Iterator[Vision]:
    """One for each seed and regime: images, base and heads are made, experts are not yet trained."""
    settings = changed(SmallSettings(), request.settings)
    refuse_flags(request, "models")
    folder = data_folder(request, "cifar100.npz and one .npz file, or folder of images, per task")
    cache = Cache(request.cache)
    backbone = Backbone("vit", 32, PLAIN_SCALE)
    limits = Limits(settings.train, settings.validation, settings.test)
    names = request.tasks or TASKS
    tasks = [prepare_task(cache, local_task(folder, name), backbone.size, watch, limits) for name in names]
    source = prepare_task(cache, local_task(folder, _BASE_TASK), backbone.size, watch)
    schedules: dict[Regime, dict[str, Schedule]] = {
        "full": {n: Schedule(settings.epochs, settings.batch_size, settings.rate) for n in names},
        "lora": {n: Schedule(settings.lora_epochs, settings.batch_size, settings.lora_rate) for n in names},
    }
    for seed in request.seeds:
        base = _base(cache, watch, backbone, settings, source, seed, request.device)
        heads = {task.name: _head(cache, backbone, settings, base, task, request.device) for task in tasks}
        for regime in request.regimes:
            yield Vision(
                **common(request, base, watch),
                regime=regime,
                seed=seed,
                digest=digest([settings, source.content, [[t.name, t.content] for t in tasks]]),
                backbone=backbone,
                tasks=tasks,
                heads=heads,
                schedules=schedules,
                rank=settings.rank,
                samples=settings.samples,
            )


def _base(
    cache: Cache,
    watch: Watch,
    backbone: Backbone,
    settings: SmallSettings,
    source: ImageTask,
    seed: int,
    device: str,
) -> Path:
    schedule = Schedule(settings.base_epochs, 2 * settings.batch_size, settings.base_rate, weight_decay=0.05)
    key = {
        "version": _VERSION,
        "sizes": settings.sizes,
        "size": backbone.size,
        "data": source.content["train"],
        "schedule": schedule,
        "seed": seed,
        "device": device.split(":")[0],
        "libraries": library_versions("torch", "transformers"),
    }

    def make(out: Path) -> None:
        with (
            watch.stage(f"base: seed {seed}", total=schedule.steps(len(source.train))) as stage,
            one_thread_on(device),
        ):
            how: dict[str, Any] = {"seed": seed, "device": device, "on_step": stage.advance}
            pretrain(backbone, settings.sizes, source, schedule, out / "encoder", **how)

    return cache.get("base", key, make, resumable=True) / "encoder"


def _head(cache: Cache, backbone: Backbone, settings: SmallSettings, base: Path, task: ImageTask, device: str) -> Path:
    key = {"base": base.parent.name, "data": task.content["train"]}

    def found() -> Tensor:
        return features(backbone, backbone.load(base), task.train, device)

    return fitted_head(cache, key, found, task.train.labels_N, len(task.class_names), settings, device)
