"""Run the demo: train, merge, test."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from actmat.engine.resources import one_thread
from actmat.errors import OutputError, RecipeError
from actmat.extras.demo.model import Head, features, load_encoder, save_encoder, save_heads
from actmat.extras.demo.tasks import TASKS, Split, generator_for
from actmat.extras.demo.training import DemoSettings, finetune, fit_heads, load_data, train_base
from actmat.foreign import terminal
from actmat.methods import all_methods, get_method
from actmat.recipe import make_recipe
from actmat.run import run_recipes
from actmat.settings import RunSettings

_Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


def run_demo(
    out: Path,
    *,
    seed: int = 0,
    methods: Sequence[str] | None = None,
    console: Console | None = None,
    settings: DemoSettings | None = None,
) -> dict[str, Any]:
    """Train a base and one expert per task, merge with every method, and compare on held-out photographs.

    Writes to `out`: `base/`, `experts/<task>/`, `merged/<method>/`, `heads.safetensors` and `results.json`.

    Args:
        out: folder to write; new or empty.
        seed: seed of split, training and random methods; the same seed gives the same weights.
        methods: names of merge methods; default: all that need no data.
        console: console for tables and progress; default: no output.
        settings: sizes and schedules.

    Returns:
        The content of `results.json`.

    Raises:
        OutputError: `out` is not empty.
        RecipeError: a method is unknown or cannot run here.
        MergeError: scikit-learn is missing, or a merge failed.
    """
    settings, console = settings or DemoSettings(), console or Console(quiet=True)
    chosen, left_out = choose_methods(methods)
    data = load_data(settings, seed)
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise OutputError(f"{out} is not empty. Remove it, or choose another folder with --out.")
    experts = {task: out / "experts" / task for task in data}
    with Progress(console=console) as bars:
        with one_thread():
            (base,) = _each(partial(train_base, settings), [seed], bars, "training the base")
            heads = fit_heads(base, data, settings)
            save_encoder(base, out / "base")
            save_heads(heads, out / "heads.safetensors")

            def train(task: str) -> None:
                expert, order = copy.deepcopy(base), generator_for(seed, f"finetuning {task}")
                finetune(expert, heads[task], data[task].train, settings.finetuning, order)
                save_encoder(expert, experts[task])

            _each(train, experts, bars, "training the experts")
        named = [{"path": str(path), "name": task} for task, path in experts.items()]
        merged = {name: out / "merged" / name.rpartition(":")[2] for name in chosen}  # FILE.py:NAME is NAME
        for name in bars.track(chosen, description="merging by every method"):
            fields = {"base": str(out / "base"), "experts": named, "out": str(merged[name])}
            recipe = make_recipe({**fields, "method": name, "seed": seed, "output": "model"})
            run_recipes([recipe], RunSettings(durable=False))
        with one_thread():
            rows = _rows(heads, data, experts, [out / "base", *merged.values()], bars)
    result = {"out": str(out), "seed": seed, "settings": asdict(settings), "rows": rows, "left_out": left_out}
    (out / "results.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8", newline="\n")
    console.print("", accuracy_table(rows, f"Test accuracy in %, {settings.n_test} photographs, seed {seed}"), sep="\n")
    console.print(_next_step(out, experts, left_out), soft_wrap=True, markup=False, highlight=False)
    return result


def choose_methods(wanted: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Methods to run (default: all that merge this many experts without data), and names of the others.

    Raises:
        RecipeError: a wanted method is unknown or cannot run here.
    """
    methods = all_methods() if wanted is None else [get_method(name) for name in dict.fromkeys(wanted)]
    others = [m.name for m in methods if m.needs_statistics or (m.max_experts or len(TASKS)) < len(TASKS)]
    if wanted is not None and others:
        raise RecipeError(f"The demo merges {len(TASKS)} experts without data, which these methods cannot.", others)
    return [m.name for m in methods if m.name not in others], others


def _rows(
    heads: Mapping[str, Head],
    data: Mapping[str, Split],
    experts: Mapping[str, Path],
    models: Sequence[Path],
    bars: Progress,
) -> list[dict[str, Any]]:
    """Table rows: the majority, the base, every task by its own expert, then the merged models."""
    base, *merged = _each(partial(correct, heads, data), models, bars, "testing the models")
    expert = {task: correct(heads, {task: data[task]}, path)[task] for task, path in experts.items()}
    majority = {n: p.test.labels_N == torch.bincount(p.train.labels_N).argmax() for n, p in data.items()}
    return [
        row_of("majority", "majority", majority, expert),
        row_of("base", "base", base, expert),
        row_of("experts", "expert", expert, expert),
        *(row_of(path.name, "merged", scores, expert) for path, scores in zip(models[1:], merged, strict=True)),
    ]


def correct(heads: Mapping[str, Head], data: Mapping[str, Split], model: Path) -> dict[str, Tensor]:
    """Task -> mask of the test photographs that the checkpoint classifies correctly."""
    encoder, tests = load_encoder(model), {task: parts.test for task, parts in data.items()}
    return {n: heads[n](features(encoder, t.images_NHW)).argmax(1) == t.labels_N for n, t in tests.items()}


def _each(work: Callable[[Any], Any], items: Collection[Any], bars: Progress, title: str) -> list[Any]:
    """Apply `work` to all items in parallel threads, each with one compute thread."""
    workers = min(os.cpu_count() or 1, len(TASKS))
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(bars.track(pool.map(work, items), total=len(items), description=title))


def _next_step(out: Path, experts: Mapping[str, Path], left_out: Sequence[str]) -> str:
    shell = " ".join(f"-e {quote(str(path))}" for path in experts.values())
    return (
        f"Left out, because they need data or fewer experts: {', '.join(left_out) or 'none'}.\n"
        f"Checkpoints and all numbers are in {terminal(out)}. Try them:\n\n"
        f"actmat merge -b {quote(str(out / 'base'))} {shell} --out my-merge"
    )


def row_of(name: str, kind: str, right: Mapping[str, Tensor], expert: Mapping[str, Tensor]) -> dict[str, Any]:
    """One table row, from the correct answers per task (bool `N`) of the model and the experts.

    `half` is half the 95 % interval of the average, `z s / sqrt(N)` with `s` the standard deviation over photographs of
    their mean scores, because photographs were drawn at random, not answers.
    """
    tasks = {task: float(right_N.double().mean()) for task, right_N in right.items()}
    score_N = torch.stack(list(right.values())).double().mean(0)
    half = _Z_95 * float(score_N.std()) / math.sqrt(len(score_N))
    of_expert = sum(share / float(expert[task].double().mean()) for task, share in tasks.items()) / len(tasks)
    average = float(score_N.mean())
    return {"name": name, "kind": kind, "tasks": tasks, "average": average, "half": half, "of_expert": of_expert}


def accuracy_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Test accuracy in %, one line per model, methods in descending order of their average."""
    caption = "± half of the 95 % interval; of expert: mean of accuracy / expert's"
    table = Table(title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for column in ("", *rows[0]["tasks"], "average", "of expert"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in sorted(rows, key=lambda row: -row["average"] if row["kind"] == "merged" else -1):
        shares = (*row["tasks"].values(), row["average"], row["half"], row["of_expert"])
        *tasks, average, half, of_expert = (f"{100 * share:.1f}" for share in shares)
        table.add_row(row["name"], *tasks, f"{average} ±{half}", of_expert, end_section=row["kind"] == "expert")
    return table
