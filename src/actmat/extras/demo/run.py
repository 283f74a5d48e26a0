"""The demo from end to end."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from actmat.engine.resources import one_thread
from actmat.errors import RecipeError
from actmat.extras.demo.heads import Head, correct, features, fit_head, majority_correct, save_heads
from actmat.extras.demo.merging import DemoFolder, choose_methods, claim_folder, merge_experts
from actmat.extras.demo.model import Encoder, EncoderConfig, load_encoder, save_encoder
from actmat.extras.demo.results import (
    DemoResult,
    Row,
    accuracy_table,
    drop_table,
    next_command,
    score_rows,
    seconds_of,
    versions_of,
)
from actmat.extras.demo.tasks import (
    LOOKS,
    TASKS,
    Split,
    Task,
    TaskData,
    load_photographs,
    moved_views,
    pose_split,
    split_photographs,
)
from actmat.extras.demo.train import finetune, pretrain
from actmat.extras.demo.training import Schedule, generator_for, side_by_side, steps_of
from actmat.foreign import terminal


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Everything but the seed. The defaults were chosen on the validation photographs of seeds 0, 1 and 2.

    The base is trained for a short time only, so that there is something left for the experts to gain; the
    experts are trained gently (a low learning rate), because several times this rate gives better experts, but
    merges that are no better than the base, by any rule.

    Args:
        encoder: sizes of the model.
        n_validation: photographs kept for choosing settings.
        n_test: photographs kept for the numbers that are reported.
        n_views: copies of every training photograph, the first as it is, the others moved by up to a pixel.
        pretraining: schedule of the base.
        finetuning: schedule of every expert.
        ridge: regularisation of the heads, relative to the mean variance of a feature.
        logit_scale: factor of the heads' regression outputs (about 0 to 1) before the softmax.
    """

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    n_validation: int = 297
    n_test: int = 600
    n_views: int = 3
    pretraining: Schedule = field(default_factory=lambda: Schedule(3, 64, 2e-3, weight_decay=0.05))
    finetuning: Schedule = field(default_factory=lambda: Schedule(8, 128, 1.5e-4))
    ridge: float = 0.1
    logit_scale: float = 10.0


def run_demo(
    out: Path,
    *,
    seed: int = 0,
    methods: Sequence[str] | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    console: Console | None = None,
    settings: DemoSettings | None = None,
) -> DemoResult:
    """Train a base and one expert per task, merge the experts with every method, compare on held-out photographs.

    Below `out` it leaves `base/`, `experts/<task>/`, `merged/<method>/`, `heads.safetensors` and `results.json`.

    Args:
        out: folder to write.
        seed: split, training and random rules are drawn from it alone: the same seed gives the same weights.
        methods: names of merge rules; default: every rule that needs no data.
        threads: experts trained, and tensors merged, side by side; default: one per core. Changes no number.
        overwrite: replace an earlier demo in `out`.
        console: for tables and progress; default: none.
        settings: sizes and schedules.

    Raises:
        OutputError: `out` is in use.
        RecipeError: a method is unknown or cannot run here.
        MergeError: scikit-learn is missing, or a merge failed.
    """
    settings = settings or DemoSettings()
    console = console or Console(quiet=True)
    if threads is not None and threads < 1:
        raise RecipeError(f"The demo needs at least one thread, got threads={threads}.")
    threads = threads or min(os.cpu_count() or 1, len(TASKS))
    chosen, left_out = choose_methods(methods, len(TASKS))
    split, data = load_data(settings, seed)
    folder = claim_folder(Path(out), [task.name for task in TASKS], overwrite=overwrite)
    laps = [time.perf_counter()]
    with _bars(console) as bars:
        with one_thread():
            base = _train_base(split, settings, seed, bars)
            heads = {task.name: _fit_head_on(base, task, data[task.name], settings) for task in TASKS}
            save_encoder(base, folder.base)
            save_heads(heads, folder.heads)
            laps.append(time.perf_counter())
            _train_experts(base, heads, data, settings, seed, folder, bars, threads)
            laps.append(time.perf_counter())
        experts = {task.name: folder.expert(task.name) for task in TASKS}
        for name in bars.track(chosen, description="merging, by method"):
            merge_experts(folder.base, experts, name, folder.merged(name), seed=seed, threads=threads)
        laps.append(time.perf_counter())
        with one_thread():
            rows = _evaluate(folder, chosen, data, heads, bars, threads)
        laps.append(time.perf_counter())

    result = _result(folder, seed, settings, split, rows, left_out, laps)
    result.save(folder.results)
    _show(result, folder, console)
    return result


def _result(
    folder: DemoFolder,
    seed: int,
    settings: DemoSettings,
    split: Split,
    rows: list[Row],
    left_out: Mapping[str, str],
    laps: Sequence[float],
) -> DemoResult:
    """All numbers of a run; `laps`: seconds at the start and after each phase."""
    return DemoResult(
        out=folder.root,
        seed=seed,
        settings=asdict(settings),
        tasks=[asdict(task) | {"n_classes": task.n_classes} for task in TASKS],
        n_photographs={"train": len(split.train), "validation": len(split.validation), "test": len(split.test)},
        rows=rows,
        left_out=left_out,
        versions=versions_of("torch", "scikit-learn", "safetensors"),
        seconds=seconds_of(laps),
    )


def load_data(settings: DemoSettings, seed: int) -> tuple[Split, dict[str, TaskData]]:
    """The photographs' split, and the data of every task.

    Raises:
        MergeError: scikit-learn is missing.
    """
    split = split_photographs(
        load_photographs(),
        n_validation=settings.n_validation,
        n_test=settings.n_test,
        generator=generator_for(seed, "split"),
    )
    return split, {task.name: pose_split(task, split, n_views=settings.n_views, seed=seed) for task in TASKS}


def _train_base(split: Split, settings: DemoSettings, seed: int, bars: Progress) -> Encoder:
    views = moved_views(split.train, settings.n_views, generator_for(seed, "views of the base"))
    bar = bars.add_task("training the base", total=len(LOOKS) * steps_of(settings.pretraining, len(views)))
    return pretrain(settings.encoder, views, settings.pretraining, seed=seed, on_step=lambda: bars.advance(bar))


def _fit_head_on(base: Encoder, task: Task, data: TaskData, settings: DemoSettings) -> Head:
    features_ND = features(base, data.train.images_NHW)
    return fit_head(features_ND, data.train.labels_N, task.n_classes, ridge=settings.ridge, scale=settings.logit_scale)


def _train_experts(
    base: Encoder,
    heads: Mapping[str, Head],
    data: Mapping[str, TaskData],
    settings: DemoSettings,
    seed: int,
    folder: DemoFolder,
    bars: Progress,
    threads: int,
) -> None:
    """One expert per task, several at the same time, each saved when it is done."""
    n_steps = sum(steps_of(settings.finetuning, len(d.train)) for d in data.values())
    bar = bars.add_task(f"training {len(TASKS)} experts", total=n_steps)

    def train(name: str) -> None:
        order = generator_for(seed, f"finetuning {name}")
        examples, schedule = data[name].train, settings.finetuning
        expert = copy.deepcopy(base)
        finetune(expert, heads[name], examples, schedule, generator=order, on_step=lambda: bars.advance(bar))
        save_encoder(expert, folder.expert(name))

    side_by_side(train, data, threads)


def _evaluate(
    folder: DemoFolder,
    methods: Sequence[str],
    data: Mapping[str, TaskData],
    heads: Mapping[str, Head],
    bars: Progress,
    threads: int,
) -> list[Row]:
    """All lines of the table, from the checkpoints as they are on disk."""
    bar = bars.add_task("testing all models", total=len(methods) + 2)

    def answers(directory: Path) -> dict[str, Tensor]:
        encoder = load_encoder(directory)
        right = {name: correct(encoder, heads[name], posed.test) for name, posed in data.items()}
        bars.advance(bar)
        return right

    experts = {n: correct(load_encoder(folder.expert(n)), heads[n], posed.test) for n, posed in data.items()}
    bars.advance(bar)
    majority = {t.name: majority_correct(data[t.name].train, data[t.name].test, t.n_classes) for t in TASKS}
    base, *merged = side_by_side(answers, [folder.base, *map(folder.merged, methods)], threads)
    return score_rows(majority, base, experts, dict(zip(methods, merged, strict=True)))


def _bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<20}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def _show(result: DemoResult, folder: DemoFolder, console: Console) -> None:
    console.print()
    console.print(accuracy_table(result))
    console.print(drop_table(result))
    if result.left_out:
        console.print(f"Left out: {'; '.join(f'{name} ({why})' for name, why in result.left_out.items())}.\n")
    went_to = f"Checkpoints and all numbers are in {terminal(result.out)}. Go on with them:\n"
    console.print(went_to, soft_wrap=True, markup=False)
    command = next_command(folder.base, [folder.expert(name) for name in result.task_names])
    console.print(command, soft_wrap=True, markup=False, highlight=False)
