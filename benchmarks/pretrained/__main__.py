"""Merges without data and the choice by inputs, on pretrained bases (docs/data-free.md, docs/tune-results.md).

    python -m benchmarks.pretrained --data DATA --cache CACHE             # all; trains what the cache lacks
    python -m benchmarks.pretrained text-minilm/lora/0 --data DATA        # these subjects only: suite/regime/seed
    python -m benchmarks.pretrained --add cart --data DATA --cache CACHE  # one more method for subjects that are there

Each subject is a line of `results/pretrained.jsonl`; those that are there are not measured again. `DATA` holds
`images/` and `text/` of the suites vision-vits14 and text-minilm.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import WORK, own_command
from benchmarks.pretrained.measure import measure, measure_methods
from benchmarks.pretrained.subjects import DATA, open_subject
from benchmarks.pretrained.tables import FILE
from benchmarks.provenance import record

ALL = [f"{suite}/{regime}/{seed}" for seed in range(3) for regime in ("full", "lora") for suite in DATA]


def add(file: Path, methods: Sequence[str], names: Sequence[str], cache: Path, data: Path | None, most: int) -> None:
    """Measure methods that lines of the file lack, and write these lines anew."""
    for name in names:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for row in (r for r in lines if r["subject"] == name):
            if missing := [m for m in methods if m not in {r["rule"] for r in row["rows"]}]:
                row["rows"] += measure_methods(open_subject(name, cache, data, most=most), missing)
                file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
                record(file, own_command())
                print(f"{name}: {', '.join(missing)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", default=ALL, help="suite/regime/seed")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--cache", type=Path, default=WORK / "pretrained-cache")
    parser.add_argument("--file", type=Path, default=FILE, help="where lines are added")
    parser.add_argument("--inputs", type=int, default=32, help="per task, to measure on and as many to choose by")
    parser.add_argument("--quick", action="store_true", help="methods without data on test data and noise only")
    parser.add_argument("--add", nargs="+", default=(), metavar="METHOD", help="for the subjects of the file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.add:
        add(given.file, given.add, given.subjects, given.cache, given.data, given.inputs)
        return
    for name in given.subjects:
        lines = given.file.read_text(encoding="utf-8").splitlines() if given.file.is_file() else []
        if name in {json.loads(line)["subject"] for line in lines}:
            continue
        subject = open_subject(name, given.cache, given.data, most=given.inputs)
        row = measure(subject, given.cache / "moments" / name, quick=given.quick)
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        row |= {"machine": machine, "date": datetime.date.today().isoformat()}
        with given.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        record(given.file, own_command())
        print(f"{name}: {len(row['rows'])} merges, {row['cpu_seconds']} s", flush=True)


if __name__ == "__main__":
    main()
