"""`vision`: CLIP ViT-B/16, B/32 and L/14 on the paper's eight tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from actmat.errors import RecipeError
from actmat_experiments.harness.cache import Cache, digest
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.results import REGIMES, Part, Regime
from actmat_experiments.harness.settings import changed
from actmat_experiments.harness.suite import known_names, run_experiments
from actmat_experiments.harness.training import Precision, Schedule
from actmat_experiments.vision.backbones import CLIP_SCALE, Backbone
from actmat_experiments.vision.clip import ClipTask, clip_base, clip_head, clip_tasks, public_expert
from actmat_experiments.vision.experiment import Vision, common
from actmat_experiments.vision.images import ImageTask, Limits, RawTask, local_task, open_hub, prepare_task

MODELS = {
    "ViT-B/32": "openai/clip-vit-base-patch32@3d74acf9a28c67741b2f4f2ea7635f0aaf6f0268",
    "ViT-B/16": "openai/clip-vit-base-patch16@57c216476eefef5ab752ec549e440a49ae4ae5f3",
    "ViT-L/14": "openai/clip-vit-large-patch14@32bd64288804d66eefd0ccbe215aa642df71cc41",
}
"""Names in tables -> repositories on the hub, at the last commits of their main branches."""


@dataclass(frozen=True, slots=True)
class ClipSettings:
    """Settings of the suite, for `--set name=value`; the defaults are the paper's.

    Args:
        experts: "train" them, or take "public" ones of the hub (full fine-tuning only).
        base: folder or hub id of the CLIP model, where it is not OpenAI's; for one model at a time.
        batch_size, micro_batches: examples per step, and in how many pieces they go through the model.
        rate, lora_rate, weight_decay, warm_up_steps: of the schedules.
        epochs: one number for all tasks; default: each task's own, about 2,000 steps.
        rank: of LoRA.
        precision, test_precision: of the forward passes in training and in tests.
        train, validation, test: largest number of examples per task.
        samples: images per task that statistics are measured on.
        measured: the part that they are of: "train", as in the paper's code, or "validation", as in its text.
        size: pixels a side; an image takes 150 kB on the disk (48 GB for all tasks).
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
    test_precision: Precision = "bfloat16"
    train: int | None = None
    validation: int | None = None
    test: int | None = None
    samples: int = 320
    measured: Part = "train"
    size: int = 224


def run(request: RunRequest) -> None:
    """See `suites.Suite` and `run_experiments`.

    Raises:
        RecipeError: a model, task or setting is not known.
        CheckpointError: data or a model cannot be had.
    """
    run_experiments(request, experiments, len(clip_tasks(request.tasks)))


def experiments(request: RunRequest, watch: Watch) -> Iterator[Vision]:
    """One for each model, seed and regime: images, base and heads are made, experts are not yet trained."""
    settings = changed(ClipSettings(), request.settings)
    names = known_names(request.models, MODELS, "model")
    if settings.experts == "public" and "lora" in request.regimes:
        raise RecipeError("Public experts exist only for full fine-tuning: leave out --lora, or experts=public.")
    cache = Cache(request.cache)
    known = clip_tasks(request.tasks)
    limits = Limits(settings.train, settings.validation, settings.test)
    tasks = [prepare_task(cache, _raw(request, task), settings.size, watch, limits) for task in known]
    watch.note(f"left out: {line}" for task in tasks for line in task.malformed)
    for name in names:
        location = settings.base or MODELS[name]
        base = clip_base(cache, location)
        heads = {
            t.name: clip_head(cache, location, base, t, k, request.device) for t, k in zip(tasks, known, strict=True)
        }
        public = {}
        if settings.experts == "public":
            family = MODELS[name].partition("/")[2].partition("@")[0]
            public = {task.name: public_expert(cache, f"tanganke/{family}_{task.expert}") for task in known}
        for seed in request.seeds:
            for regime in request.regimes:
                yield Vision(
                    **common(request, base / "encoder", watch),
                    model=name,
                    regime=regime,
                    seed=seed,
                    digest=_settings_digest(settings, base.name, tasks),
                    backbone=Backbone("clip", settings.size, CLIP_SCALE),
                    tasks=tasks,
                    heads=heads,
                    schedules={r: _schedules(settings, known, r) for r in REGIMES},
                    rank=settings.rank,
                    precision=settings.precision,
                    test_precision=settings.test_precision,
                    public=public,
                    samples=settings.samples,
                    measured=settings.measured,
                )


def _raw(request: RunRequest, task: ClipTask) -> RawTask:
    if request.data is not None:
        return local_task(request.data, task.name)
    return open_hub(task.name, task.hub, task.classes, task.names)


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
    idle = ("base", "train", "validation", "test")
    plain = {n: v for n, v in asdict(settings).items() if n not in idle}
    return digest([plain, base, [[t.name, t.content] for t in tasks]])
