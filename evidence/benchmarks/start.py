"""How long do commands take that compute nothing, and when does a merge say its first word?

    python -m benchmarks.start

Processor time (user and system) of whole processes with bytecode written, medians; `first_line_s` is the wall time
until `actmat merge` has written to a terminal.
"""

from __future__ import annotations

import os
import pty
import statistics
import subprocess
import tempfile
import time
from typing import Any

from benchmarks.common import SOURCE, actmat_command, finish, measure, program

COLUMNS = ("command", "cpu_s", "wall_s", "first_line_s", "load")
COMMANDS = ("--version", "--help", "methods", "methods ties", "merge --help", "statistics --help")


def first_line(repeats: int) -> float:
    """Median seconds until a merge, of folders that are not there, has written something to a terminal."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        command = [*actmat_command(), "merge", "-b", f"{folder}/base", "-e", f"{folder}/expert", "--out", f"{folder}/x"]
        for _ in range(repeats):
            ours, theirs = pty.openpty()
            started = time.perf_counter()
            child = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL, env={**os.environ, **SOURCE})
            os.read(ours, 1)
            found.append(time.perf_counter() - started)
            child.kill()
            child.wait()
            os.close(ours)
            os.close(theirs)
    return statistics.median(found)


def main() -> None:
    """Run all commands in turn and write evidence/results/start.json."""
    given = program(__doc__, "start", 5).parse_args()
    rows: list[dict[str, Any]] = []
    for text in COMMANDS:
        command = [*actmat_command(), *text.split()]
        measure(command, **SOURCE)  # writes the bytecode
        load = os.getloadavg()[0]
        runs = [measure(command, **SOURCE) for _ in range(given.repeats)]
        cpu, wall = ([getattr(run, name) for run in runs] for name in ("cpu_s", "wall_s"))
        rows.append({
            "command": text, "cpu_s": statistics.median(cpu), "wall_s": statistics.median(wall), "load": load,
            "all_cpu_s": [round(seconds, 3) for seconds in cpu],
        })  # fmt: skip
    load = os.getloadavg()[0]
    rows.append({"command": "merge, on a terminal", "first_line_s": first_line(given.repeats), "load": load})
    finish(given.name, rows, COLUMNS)


if __name__ == "__main__":
    main()
