"""Merges of the first two to seven of a suite's experts, added to the repository's result files.

    python -m benchmarks.evidence.more --suite vision-vits14 --data DATA --cache CACHE [--lora] [--seed 1]

What the result file has is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from actmat_experiments.harness.experiment import Experiment
from actmat_experiments.harness.origin import commit
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.request import RunRequest
from actmat_experiments.harness.rows import candidates
from actmat_experiments.pretrained import text, vision
from benchmarks.common import without_places
from benchmarks.evidence.group import FOLDER, NAMES
from benchmarks.evidence.subsets import subset_file
from benchmarks.provenance import record

SUBSET_ROWS = {
    "full": ("average", "tsv", "actmat", "actmat_ridge"),
    "lora": ("average", "actmat", "tsv", "dc_merge", "cart", "tsv@pico", "dc_merge@pico"),
}

MODULES = {NAMES["text"]: text, NAMES["vision"]: vision}


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
    parser.add_argument("--suite", choices=sorted(MODULES), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True, help="of 'actmat experiment run'")
    parser.add_argument("--lora", action="store_true", help="experts by LoRA of rank 16")
    parser.add_argument("--seed", type=int, default=0, help="of training (default: 0)")
    given = parser.parse_args()
    request = RunRequest(
        suite=given.suite,
        cache=given.cache,
        data=given.data,
        regimes=("lora",) if given.lora else ("full",),
        seeds=(given.seed,),
        settings={"ranks": "16"},
        threads=1,
        console=Console(file=sys.stderr),
    )
    path = subset_file(FOLDER, given.suite)
    append_new(path, subsets(request))
    record(path, " ".join(["python -m benchmarks.evidence.more", *without_places(sys.argv[1:])]))


if __name__ == "__main__":
    main()
