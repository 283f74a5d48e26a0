"""The family matrix: every architecture class that can be built tiny is merged, loaded and run.

    python -m benchmarks.families | tee rows.txt        # all of them, some 20 minutes on one core
    python -m benchmarks.families --resume rows.txt     # takes over what an interrupted run has printed
    python -m benchmarks.families --only Llama T5       # classes whose names begin so, printed, nothing written
    python -m benchmarks.families --only Llama --renew  # the same, and their rows of the result are replaced

Each class is checked in a process that is shared by a few, so that one that takes the memory or the time of the machine
is a row with that reason. `benchmarks.table` makes docs/families.md of the result.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

from benchmarks.common import read_result, write_result
from benchmarks.families.server import serve
from benchmarks.families.tiny import Architecture, architectures

LONGEST = 40.0
"""Seconds that one class may take."""


class Worker:
    """A process that checks one class at a time, started anew after one that took too long."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.mine, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        self.begun: float | None = None

    def check(self, one: Architecture) -> dict[str, Any]:
        """The row of one class."""
        self.mine.send(one)
        row = {"library": one.library, "class": one.name, "type": one.model_type, "stage": "none"}
        try:
            if self.mine.poll(LONGEST if self.begun else 2 * LONGEST):
                self.begun = time.monotonic()
                return dict(self.mine.recv())
            why = f"took more than {LONGEST:.0f} s"
        except (EOFError, ConnectionResetError):
            why = "the process ended"
        self.process.kill()
        self.process.join()
        self._start()
        return row | {"why": why}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="classes whose names begin so")
    parser.add_argument("--renew", action="store_true", help="replace the rows of the chosen classes in the result")
    parser.add_argument("--resume", type=Path, nargs="+", default=[], help="output of earlier runs; later ones win")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="check no further class after so long; 0: none"
    )
    given = parser.parse_args()
    began = time.monotonic()
    rows = {(r["library"], r["class"]): r for path in given.resume for r in printed_rows(path)}
    chosen = [
        one
        for one in (architectures() if given.seconds > 0 else ())
        if (given.only is None or one.name.startswith(tuple(given.only))) and (one.library, one.name) not in rows
    ]
    worker = Worker() if chosen else None
    for k, one in enumerate(chosen):
        if worker is None or time.monotonic() - began > given.seconds:
            break
        rows[one.library, one.name] = worker.check(one)
        print(f"{k + 1}/{len(chosen)} {json.dumps(rows[one.library, one.name])}", flush=True)
    if worker is not None:
        worker.mine.send(None)
    if given.renew:
        renewed(rows)
    elif given.only is None:
        write_result("families", [rows[key] for key in sorted(rows)])


def renewed(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Put these rows in place of those of the result, which keeps its command; `renewed` names the classes."""
    before = read_result("families")
    every = {(r["library"], r["class"]): r for r in before["rows"]} | rows
    names = sorted({*before.get("renewed", ()), *(name for _, name in rows)})
    write_result("families", [every[key] for key in sorted(every)], command=before["command"], renewed=names)


def printed_rows(path: Path) -> list[dict[str, Any]]:
    """The rows in the output of a run."""
    lines = path.read_text().splitlines()
    return [json.loads(line.partition(" ")[2]) for line in lines if line[:1].isdigit() and "{" in line]


if __name__ == "__main__":
    main()
