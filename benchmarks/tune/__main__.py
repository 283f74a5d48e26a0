"""Is the merge that `actmat tune` chooses from unlabeled inputs the best one on the test data?

    python -m benchmarks.tune --data DATA                       # trains what is not in the cache, measures all
    python -m benchmarks.tune --suites vision-small --seeds 0 1 2
    python -m benchmarks.tune --one 1                           # the next subject only

Each subject is a line of `results/tune.jsonl`; those that are there are not measured again. `DATA` holds `images/`
of the suite vision-small.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from pathlib import Path

import torch

from benchmarks.common import RESULTS, WORK, own_command, read_lines
from benchmarks.provenance import record
from benchmarks.tune.measure import measure
from benchmarks.tune.subjects import SUITES, subjects

FILE = RESULTS / "tune.jsonl"


def done(path: Path) -> set[str]:
    """Names of the subjects of a file."""
    return {row["subject"] for row in read_lines(path)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", default=SUITES, choices=SUITES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--cache", type=Path, default=WORK / "tune-cache")
    parser.add_argument("--file", type=Path, default=FILE, help="where lines are added")
    parser.add_argument("--only-train", action="store_true", help="fill the cache, measure nothing")
    parser.add_argument("--one", type=int, default=0, help="measure so many subjects and stop")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.cache.mkdir(parents=True, exist_ok=True)
    given.file.parent.mkdir(parents=True, exist_ok=True)
    measured = 0
    for suite in given.suites:
        for seed in given.seeds:
            if f"{suite}/full/{seed}" in done(given.file):
                continue
            for subject in subjects(suite, given.cache, given.data, [seed]):
                print(f"{subject.name}: trained", flush=True)
                if given.only_train:
                    continue
                row = measure(subject, given.cache / "merging" / subject.name)
                machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
                row |= {"machine": machine, "date": datetime.date.today().isoformat()}
                with given.file.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                record(given.file, own_command())
                chosen, best = row["chosen"], max(c["test"] for c in row["candidates"])
                print(f"  {chosen['candidate']}: {chosen['test']:.3f}, best {best:.3f}", row["cpu_seconds"], "s")
                measured += 1
                if given.one and measured >= given.one:
                    return


if __name__ == "__main__":
    main()
