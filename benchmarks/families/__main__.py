"""The family matrix: every architecture class that can be built tiny is merged, loaded and run.

    python -m benchmarks.families                       # all of them, some 20 minutes on one core
    python -m benchmarks.families --only Llama T5       # classes whose names begin so, printed, nothing written

Each class is checked in a process that is shared by a few, so that one that takes the memory or the time of the machine
is a row with that reason. `docs.generate` makes docs/families.md of the result.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from typing import Any

from benchmarks.common import write_result
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
    parser.add_argument("--library", choices=["transformers", "diffusers"])
    given = parser.parse_args()
    chosen = [
        one
        for one in architectures()
        if (given.only is None or one.name.startswith(tuple(given.only))) and given.library in (None, one.library)
    ]
    worker, rows = Worker(), []
    for k, one in enumerate(chosen):
        rows.append(worker.check(one))
        print(f"{k + 1}/{len(chosen)} {json.dumps(rows[-1])}", flush=True)
    worker.mine.send(None)
    if given.only is None and given.library is None:
        write_result("families", rows)


if __name__ == "__main__":
    main()
