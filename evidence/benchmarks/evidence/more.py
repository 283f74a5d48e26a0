"""More measurements on the suites' experts, added to the repository's result files.

    python -m benchmarks.evidence.more sweep --suite text-minilm --data DATA --cache CACHE --task mpqa
    python -m benchmarks.evidence.more subsets --suite vision-vits14 --data DATA --cache CACHE [--lora] [--seed 1]

`sweep` trains one task's expert for other lengths and at other rates, and measures the cosines of `D^T D` with the Gram
matrices: the paper's theorem speaks of small steps. `subsets` merges the first two to seven experts. What
the result files have is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from actmat_experiments.harness.cache import digest
from actmat_experiments.harness.experiment import Experiment
from actmat_experiments.harness.origin import commit
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.rows import candidates
from actmat_experiments.pretrained import text, vision
from actmat_experiments.pretrained.gram import gram_rows
from benchmarks.common import without_places
from benchmarks.evidence.cosines import sweep_file
from benchmarks.evidence.group import FOLDER, NAMES
from benchmarks.evidence.subsets import subset_file
from benchmarks.provenance import record

RUNS = (
    *((8, 1e-5), (8, 1e-4), (8, 1e-3), (64, 1e-5), (64, 1e-4), (64, 1e-3), (64, 1e-2)),
    *((256, 1e-4), (256, 1e-3)),
)
"""Steps and rates, from short and cold to long and hot; the suite's own run, 64 steps at 1e-4, is among them."""

SUBSET_ROWS = {
    "full": ("average", "tsv", "actmat", "actmat_ridge"),
    "lora": ("average", "actmat", "tsv", "dc_merge", "cart", "tsv@pico", "dc_merge@pico"),
}

MODULES = {NAMES["text"]: text, NAMES["vision"]: vision}


def sweep(request: RunRequest, runs: Sequence[tuple[int, float]] = RUNS) -> Iterator[dict[str, Any]]:
    """Rows of `gram_rows` with the length and rate of the run, and the expert's own accuracy; of `text-minilm` alone.

    A run of fewer steps than an epoch learns from the first examples of the task; head and test data stay.
    """
    whole = _first(request)
    assert isinstance(whole, text.PretrainedText)
    for steps, rate in runs:
        experiment = _trained(whole, steps, rate)
        own = experiment.own_answers("test")
        for row in gram_rows(experiment):
            counts = own[row["task"]]
            answers = {"correct": counts["correct"], "total": counts["total"]}
            yield {**_about(experiment), "steps": steps, "rate": rate, **row, **answers}


def _trained(whole: text.PretrainedText, steps: int, rate: float) -> text.PretrainedText:
    """The experiment with another length and rate of training."""
    batch = whole.schedule.batch_size
    tasks = []
    for task in whole.tasks:
        train = task.train[: steps * batch]
        content = {**task.content, "train": digest([list(e) for e in train])}
        tasks.append(task if len(train) == len(task.train) else replace(task, train=train, content=content))
    epochs = max(1, steps * batch // len(whole.tasks[0].train))
    return replace(whole, tasks=tasks, schedule=replace(whole.schedule, epochs=epochs, learning_rate=rate))


def subsets(request: RunRequest, rows: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Test accuracy of merges of the first two to seven experts, on their tasks, at the default scale."""
    experiment = _first(request)
    for n in range(2, len(experiment.names) + 1):
        some, _ = candidates(rows or SUBSET_ROWS[experiment.regime], experiment.regime, n)
        found = experiment.merges(some, only=experiment.names[:n], tune=False)
        for row, result in found.items():
            for task, counts in result["test"][str(result["default"])].items():
                answers = {"task": task, "correct": counts["correct"], "total": counts["total"]}
                about = {**_about(experiment), "method": row, "experts": n}
                yield {**about, **answers, "merge": result["merge"]}


def append_new(path: Path, rows: Iterator[Mapping[str, Any]]) -> None:
    """Add lines to a file as they become known, but none that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    there = set(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else set()
    for row in rows:
        if (line := json.dumps(row, sort_keys=True)) not in there:
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def _first(request: RunRequest) -> Experiment:
    watch = Watch(request.console, request.cache / "logs")
    return next(iter(MODULES[request.suite].experiments(request, watch)))


def _about(experiment: Experiment) -> dict[str, Any]:
    return {**experiment.about, "commit": commit()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sweep", "subsets"])
    parser.add_argument("--suite", choices=sorted(MODULES), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True, help="of 'actmat experiment run'")
    parser.add_argument("--task", help="the task of a sweep")
    parser.add_argument("--lora", action="store_true", help="experts by LoRA of rank 16")
    parser.add_argument("--seed", type=int, default=0, help="of training (default: 0)")
    given = parser.parse_args()
    if (given.what == "sweep") != bool(given.task) or (given.what, given.suite) == ("sweep", NAMES["vision"]):
        parser.error("sweep is of a --task of text-minilm, and --task belongs to it only")
    request = RunRequest(
        suite=given.suite,
        cache=given.cache,
        tasks=(given.task,) if given.task else None,
        data=given.data,
        regimes=("lora",) if given.lora else ("full",),
        seeds=(given.seed,),
        settings={"ranks": "16"},
        threads=1,
        console=Console(file=sys.stderr),
    )
    if given.what == "sweep":
        path, rows = sweep_file(FOLDER, given.suite), sweep(request)
    else:
        path, rows = subset_file(FOLDER, given.suite), subsets(request)
    append_new(path, rows)
    record(path, " ".join(["python -m benchmarks.evidence.more", *without_places(sys.argv[1:])]))


if __name__ == "__main__":
    main()
