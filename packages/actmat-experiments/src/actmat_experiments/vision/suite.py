"""`vision`: CLIP ViT-B/16, B/32 and L/14 on the paper's eight tasks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from actmat.demo.training import Schedule
from actmat.errors import RecipeError, did_you_mean
from actmat_experiments.harness.cache import Cache, digest
from actmat_experiments.harness.processes import placed
from actmat_experiments.harness.progress import Watch, quiet_libraries
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.settings import changed
from actmat_experiments.suites import RunRequest, TableRequest
from actmat_experiments.vision.backbones import CLIP_SCALE, Backbone
from actmat_experiments.vision.clip import ClipTask, clip_base, clip_head, clip_tasks, public_expert
from actmat_experiments.vision.compare import compare
from actmat_experiments.vision.compare import study as study_variants
from actmat_experiments.vision.experiment import Vision
from actmat_experiments.vision.finetune import Precision
from actmat_experiments.vision.images import ImageTask, Limits, prepare_task
from actmat_experiments.vision.sources import RawTask, local_task, open_hub
from actmat_experiments.vision.tables import show

__all__ = ["MODELS", "ClipSettings", "prepared", "run", "study", "table"]

MODELS = {
    "ViT-B/32": "openai/clip-vit-base-patch32",
    "ViT-B/16": "openai/clip-vit-base-patch16",
    "ViT-L/14": "openai/clip-vit-large-patch14",
}


@dataclass(frozen=True, slots=True)
class ClipSettings:
    """Settings of the suite, for `--set name=value`; the defaults are the paper's.

    Args:
        experts: "train" them, or take "public" ones of the hub (full fine-tuning alone).
        base: folder or hub id of the CLIP model, where it is not OpenAI's; for one model at a time.
        batch_size, micro_batches: examples per step, and in how many pieces they go through the model.
        rate, lora_rate, weight_decay, warm_up_steps: of the schedules.
        epochs: one number for all tasks; default: each task's own, about 2,000 steps.
        rank: of LoRA.
        precision: of the forward passes in training.
        train, validation, test: largest number of examples per task.
        samples: training images per task that statistics are measured on.
        subsets: subsets of experts per size, for the figure of accuracy against their number; 0 for none.
        size: pixels a side.
    """

    experts: Literal["train", "public"] = "train"
    base: str | None = None
    batch_size: int = 128
    micro_batches: int = 1
    rate: float = 1e-5
    lora_rate: float = 1e-4
    weight_decay: float = 0.1
    warm_up_steps: int = 500
    epochs: int | None = None
    rank: int = 16
    precision: Precision = "bfloat16"
    train: int | None = None
    validation: int | None = None
    test: int | None = None
    samples: int = 320
    subsets: int = 0
    size: int = 224


def run(request: RunRequest) -> None:
    """See `suites.Suite`. Under `accelerate launch` every process trains its share of the experts on its own GPU, and
    the first one goes on with the merges.

    Raises:
        RecipeError: a model, task or setting is not known.
        CheckpointError: data or a model cannot be had.
    """
    names = request.models or list(MODELS)
    if unknown := [n for n in names if n not in MODELS]:
        problems = [f"there is no model '{n}'.{did_you_mean(n, MODELS)} Models: {', '.join(MODELS)}" for n in unknown]
        raise RecipeError("These models are not known.", problems)
    settings = changed(ClipSettings(), request.settings)
    share, device = placed(request.device)
    left_out: dict[str, str] = {}
    with Watch(request.console, request.cache / "logs") as watch:
        for name in names:
            for seed in request.seeds:
                vision = prepared(request, name, seed, watch, device)
                if share is not None:
                    for regime in request.regimes:
                        vision.experts(regime, share)
                    if share[0]:
                        continue
                left_out |= compare(vision, request, subsets=settings.subsets)
    for method, why in left_out.items():
        watch.console.print(f"left out: {method} ({why})", highlight=False)


def prepared(request: RunRequest, name: str, seed: int, watch: Watch, device: str) -> Vision:
    """Everything up to the experts, for one model and seed."""
    settings = changed(ClipSettings(), request.settings)
    if settings.experts == "public" and "lora" in request.regimes:
        raise RecipeError("There are public experts of full fine-tuning alone: leave out --lora, or experts=public.")
    quiet_libraries()
    cache = Cache(request.cache)
    cache.root.mkdir(parents=True, exist_ok=True)
    location = settings.base or MODELS[name]
    known = clip_tasks(request.tasks)
    limits = Limits(settings.train, settings.validation, settings.test)
    tasks = [prepare_task(cache, _raw(request, task), settings.size, watch, limits) for task in known]
    base = clip_base(cache, location)
    heads = {t.name: clip_head(cache, location, base, t, k, device) for t, k in zip(tasks, known, strict=True)}
    public = {}
    if settings.experts == "public":
        family = MODELS[name].partition("/")[2]
        public = {task.name: public_expert(cache, f"tanganke/{family}_{task.expert}") for task in known}
    return Vision(
        suite=request.suite,
        model=name,
        backbone=Backbone("clip", settings.size, CLIP_SCALE),
        tasks=tasks,
        base=base / "encoder",
        heads=heads,
        schedules={"full": _schedules(settings, known, "full"), "lora": _schedules(settings, known, "lora")},
        seed=seed,
        settings=_settings_digest(settings, base.name, tasks),
        cache=cache,
        watch=watch,
        rank=settings.rank,
        device=device,
        threads=request.threads or os.cpu_count() or 1,
        precision=settings.precision,
        public=public,
        samples=settings.samples,
    )


def study(request: RunRequest) -> str:
    """See `suites.Suite`; one model.

    Raises:
        RecipeError: not exactly one model was asked for.
    """
    if request.models is None or len(request.models) != 1 or request.models[0] not in MODELS:
        raise RecipeError(f"The study takes one model at a time: --models with one of {', '.join(MODELS)}.")
    (name,) = request.models
    return study_variants(request, lambda seed, watch: prepared(request, name, seed, watch, request.device))


def table(request: TableRequest) -> None:
    """See `suites.Suite`."""
    show(request, models=tuple(MODELS))


def _raw(request: RunRequest, task: ClipTask) -> RawTask:
    if request.data is not None:
        return local_task(request.data, task.name)
    return open_hub(task.name, task.hub, task.classes)


def _schedules(settings: ClipSettings, known: Sequence[ClipTask], regime: Regime) -> dict[str, Schedule]:
    return {
        task.name: Schedule(
            epochs=settings.epochs or task.epochs,
            batch_size=settings.batch_size,
            learning_rate=settings.rate if regime == "full" else settings.lora_rate,
            weight_decay=settings.weight_decay,
            warm_up_steps=settings.warm_up_steps,
            micro_batches=settings.micro_batches,
        )
        for task in known
    }


def _settings_digest(settings: ClipSettings, base: str, tasks: Sequence[ImageTask]) -> str:
    """Stands for all but seed, regime and row; what changes no score is left out."""
    plain = {n: v for n, v in asdict(settings).items() if n not in ("subsets", "base", "train", "validation", "test")}
    return digest([plain, base, [[t.name, t.content] for t in tasks]])
