"""The demo from end to end.

Shapes: `N` photographs.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from actmat.demo.data import Split, load_photographs, moved_views, split_photographs
from actmat.demo.evaluate import correct, features, majority_correct
from actmat.demo.heads import Head, fit_head, save_heads
from actmat.demo.merging import Candidate, choose_methods, merge_candidates
from actmat.demo.model import Encoder, load_encoder, save_encoder
from actmat.demo.output import DemoFolder, claim_folder
from actmat.demo.results import DemoResult, Row, score_row
from actmat.demo.settings import DemoSettings
from actmat.demo.table import accuracy_table, drop_table, next_command
from actmat.demo.tasks import LOOKS, TASKS, Task, TaskData, pose_split
from actmat.demo.train import finetune, pretrain
from actmat.demo.training import generator_for, side_by_side, steps_of
from actmat.engine.resources import one_thread
from actmat.errors import RecipeError
from actmat.version import __version__

__all__ = ["run_demo"]


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
        seed: split, training and random rules are drawn from it alone: the same seed gives the same weights.
        methods: names of merge rules; default: every rule that needs no data.
        threads: experts trained, and tensors merged, side by side; default: one per core. Changes no number.
        overwrite: replace an earlier demo in `out`.

    Returns:
        All numbers; the same as in `results.json`.

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
    photographs = load_photographs()
    folder = claim_folder(Path(out), overwrite=overwrite)
    sizes = {"n_validation": settings.n_validation, "n_test": settings.n_test}
    split = split_photographs(photographs, **sizes, generator=generator_for(seed, "split"))
    data = {task.name: pose_split(task, split, n_views=settings.n_views, seed=seed) for task in TASKS}
    clock = _Clock()

    with _bars(console) as bars:
        with one_thread():
            base = _train_base(split, settings, seed, bars)
            heads = {task.name: _fit_head_on(base, task, data[task.name], settings) for task in TASKS}
            save_encoder(base, folder.base)
            save_heads(heads, folder.heads)
            clock.lap("base")
            _train_experts(base, heads, data, settings, seed, folder, bars, threads)
            clock.lap("experts")
        _merge(folder, chosen, seed, bars, threads)
        clock.lap("merges")
        with one_thread():
            rows = _evaluate(folder, chosen, data, heads, bars, threads)
            clock.lap("evaluation")

    result = _result(folder, seed, settings, split, rows, left_out, clock.laps)
    result.save(folder.results)
    _show(result, folder, console)
    return result


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

    def train(task: Task) -> None:
        expert = finetune(
            base,
            heads[task.name],
            data[task.name].train,
            settings.finetuning,
            generator=generator_for(seed, f"finetuning {task.name}"),
            on_step=lambda: bars.advance(bar),
        )
        save_encoder(expert, folder.expert(task.name))

    side_by_side(train, TASKS, threads)


def _merge(folder: DemoFolder, methods: Sequence[str], seed: int, bars: Progress, threads: int) -> None:
    """Merge all experts by every method."""
    places = {task.name: folder.expert(task.name) for task in TASKS}
    for name in bars.track(methods, description="merging, by method"):
        outs = {name: folder.merged(name)}
        merge_candidates(folder.base, places, [Candidate(name, name)], outs, seed=seed, threads=threads)


def _evaluate(
    folder: DemoFolder,
    methods: Sequence[str],
    data: Mapping[str, TaskData],
    heads: Mapping[str, Head],
    bars: Progress,
    threads: int,
) -> list[Row]:
    """All lines of the table, from the checkpoints as they are on disk."""
    tasks = {task.name: task for task in TASKS}
    bar = bars.add_task("testing all models", total=len(methods) + 2)

    def answers(directory: Path) -> dict[str, Tensor]:
        encoder = load_encoder(directory)
        right = {name: correct(encoder, heads[name], data[name].test) for name in tasks}
        bars.advance(bar)
        return right

    experts = {n: correct(load_encoder(folder.expert(n)), heads[n], data[n].test) for n in tasks}
    bars.advance(bar)
    majority = {n: majority_correct(data[n].train, data[n].test, task.n_classes) for n, task in tasks.items()}
    base, *merged = side_by_side(answers, [folder.base, *map(folder.merged, methods)], threads)
    return [
        score_row("majority", "majority", majority, experts),
        score_row("base", "base", base, experts),
        score_row("experts", "expert", experts, experts),
        *(score_row(name, "merged", right, experts) for name, right in zip(methods, merged, strict=True)),
    ]


def _result(
    folder: DemoFolder,
    seed: int,
    settings: DemoSettings,
    split: Split,
    rows: Sequence[Row],
    left_out: Mapping[str, str],
    seconds: Mapping[str, float],
) -> DemoResult:
    return DemoResult(
        out=folder.root,
        seed=seed,
        settings=asdict(settings),
        tasks=[asdict(task) | {"n_classes": task.n_classes} for task in TASKS],
        n_photographs={"train": len(split.train), "validation": len(split.validation), "test": len(split.test)},
        rows=rows,
        left_out=left_out,
        versions=_versions(),
        seconds=seconds,
    )


class _Clock:
    """Wall time of the phases."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        """The phase ends now, the next begins."""
        now = time.perf_counter()
        self.laps[phase], self._since = round(now - self._since, 2), now


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("torch", "scikit-learn", "safetensors")}
    return {"actmat": __version__, "python": platform.python_version(), **libraries}


def _show(result: DemoResult, folder: DemoFolder, console: Console) -> None:
    console.print()
    console.print(accuracy_table(result))
    console.print(drop_table(result))
    if result.left_out:
        console.print(f"Left out: {'; '.join(f'{name} ({why})' for name, why in result.left_out.items())}.\n")
    console.print(f"Checkpoints and all numbers are in {result.out}. Go on with them:\n", soft_wrap=True)
    command = next_command(folder.base, [folder.expert(str(t["name"])) for t in result.tasks])
    console.print(command, soft_wrap=True, markup=False, highlight=False)
