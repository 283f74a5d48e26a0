"""`python -m fuzz`: cases per door, and every failure; exit code 1 if there is one.

    python -m fuzz --minutes 10                     # new seeds at each call, shared among the doors
    python -m fuzz --door headers --seed 0 --case 17   # one case again

A case that breaks a promise is kept below `fuzz/seeds`; the tests try those first.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import fuzz.doors  # noqa: F401 - registers the doors
from fuzz.harness import DOORS, case_of, keep_case
from fuzz.worker import Batch, run_batch, run_files

BATCH = 2000
"""Cases of one forked process."""


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--minutes", type=float, default=10, help="time of all doors together")
    parser.add_argument("--door", action="append", choices=sorted(DOORS), help="may be repeated; default: all")
    parser.add_argument("--seed", type=int, default=None, help="of the cases; default: the time")
    parser.add_argument("--case", type=int, default=None, help="try the case with this number only")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = given.door or sorted(DOORS)
    if given.case is not None:
        return _one(names[0], given.seed or 0, given.case)
    seed = int(time.time()) if given.seed is None else given.seed
    return min(1, sum(_search(name, seed, 60 * given.minutes / len(names)) for name in names))


def _one(name: str, seed: int, number: int) -> int:
    files = case_of(DOORS[name], seed, number)
    for file, content in files.items():
        print(f"{file}: {content[:3000]!r}")
    batch = run_files(name, [files])
    print(f"{batch.slowest:.4f} s, {batch.memory / 1e6:.1f} MB")
    return _report(name, seed, batch)


def _search(name: str, seed: int, seconds: float) -> int:
    """Try cases of a door until the time is over or one fails; returns the number of failures."""
    began, total = time.monotonic(), Batch()
    while time.monotonic() < began + seconds and not total.failures:
        batch = run_batch(name, seed, total.cases, BATCH, deadline=began + seconds)
        total.add(batch)
        _report(name, seed, batch)
    rate = total.cases / (time.monotonic() - began)
    print(f"{name:16} {total.cases:8} cases, {len(total.failures)} found, slowest {total.slowest:.3f} s, largest "
          f"{total.memory / 1e6:.0f} MB, {rate:.0f} per second", flush=True)  # fmt: skip
    return len(total.failures)


def _report(name: str, seed: int, batch: Batch) -> int:
    """Print failures, one of each kind in full, and keep their cases."""
    seen = set()
    for number, kind, said in batch.failures:
        if kind in seen:
            continue
        seen.add(kind)
        kept = keep_case(name, case_of(DOORS[name], seed, number))
        print(f"FAILED: --door '{name}' --seed {seed} --case {number}: {kind}\nkept in {kept}\n{said}", flush=True)
    return int(bool(batch.failures))


if __name__ == "__main__":
    sys.exit(main())
