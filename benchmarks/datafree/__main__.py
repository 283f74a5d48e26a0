"""Can a merge without data beat the average of adapters, and can its length be known?

    python -m benchmarks.datafree --data DATA              # trains what is not in the cache, measures all
    python -m benchmarks.datafree digits/lora/0            # these subjects only: suite/regime/seed

Each subject is a line of `results/datafree.jsonl`; those that are there are not measured again. `DATA` holds `images/`
of the suite vision-vits14. Rules and lengths were chosen on seed 0 of the digits and are judged elsewhere.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from pathlib import Path

import torch

from benchmarks.common import WORK, own_command
from benchmarks.datafree.measure import measure
from benchmarks.datafree.picks import FILE, read_rows
from benchmarks.provenance import record
from benchmarks.tune.subjects import DIGITS, subjects

ALL = (
    *(f"digits/{family}/{seed}" for seed in range(3) for family in DIGITS),
    *(f"vision-vits14/{regime}/{seed}" for seed in range(2) for regime in ("full", "lora")),
    "reasoning-small/full/0",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", default=ALL, help="suite/regime/seed")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--cache", type=Path, default=WORK / "tune-cache")
    parser.add_argument("--file", type=Path, default=FILE, help="where lines are added")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.cache.mkdir(parents=True, exist_ok=True)
    for name in given.subjects:
        if name in {row["subject"] for row in read_rows(given.file)}:
            continue
        suite, regime, seed = name.split("/")
        for subject in subjects(suite, given.cache, given.data, [int(seed)], regime):
            machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
            row = measure(subject) | {"machine": machine, "date": datetime.date.today().isoformat()}
            with given.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            record(given.file, own_command())
            print(f"{name}: {len(row['rows'])} merges, {row['cpu_seconds']} s", flush=True)


if __name__ == "__main__":
    main()
