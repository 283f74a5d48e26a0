"""Everything about one device in at most eight minutes: rates, conformance, layers, merges with and without inputs.

    python -m benchmarks.gpu                                   # cuda:0
    python -m benchmarks.gpu --device cpu:0 --quick            # rehearsal: a simulated device, tiny shapes

Needs a checkout, torch, and the libraries that `actmat` needs; no network. Every part is a process of its own with a
limit of seconds: a part that fails or is stopped keeps the rows that it has printed, and says so. Order: what matters
most comes first. `results/gpu.json` has one table per part; `--name /some/where/gpu` writes elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, WORK, print_table, program, write_result
from benchmarks.gpu.rows import MARK, add_row
from benchmarks.provenance import EVIDENCE

PARTS: dict[str, tuple[list[str], int]] = {
    "rates": (["rates"], 30),
    "conformance": (["conformance"], 30),
    "inputs": (["inputs"], 200),
    "layer of 7B": (["layers", "--model", "7b"], 60),
    "layer of 70B": (["layers", "--model", "70b"], 90),
    "merges of 1.1B": (["merges", "--size", "1.1b"], 180),
    "merges of 7B": (["merges", "--size", "7b"], 180),
}
"""Part -> module with its arguments, and its limit in seconds."""


def run_part(name: str, given: argparse.Namespace, left: float) -> dict[str, Any]:
    """Rows of a part, its seconds, and why it ended early; `name` may end in another limit, as `rates:20`."""
    name, _, other = name.partition(":")
    words, limit = PARTS[name]
    seconds = min(left, int(other or limit))
    command = [sys.executable, "-u", "-m", f"benchmarks.gpu.{words[0]}", *words[1:]]
    command += ["--device", given.device, "--folder", str(given.folder), *["--quick"] * given.quick]
    print(f"\n== {name}", flush=True)
    began = time.perf_counter()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child = subprocess.Popen(command, **pipes, text=True, cwd=EVIDENCE, start_new_session=True)
    stopped = threading.Timer(seconds, lambda: os.killpg(child.pid, signal.SIGKILL))  # merges too
    stopped.start()
    rows: list[dict[str, Any]] = []
    last: list[str] = []
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(MARK):
            print(line.removeprefix(MARK), end="", flush=True)
            add_row(rows, json.loads(line.removeprefix(MARK)))
        else:
            last = [*last[-25:], line.rstrip()]
    status, alive = child.wait(), stopped.is_alive()
    stopped.cancel()
    took = time.perf_counter() - began
    ended = "" if not status else f"exit status {status}" if alive else f"stopped after {took:.0f} s"
    if status and alive:
        print("\n".join(last), flush=True)
    return {"part": name, "seconds": round(took, 1), "ended": ended, "rows": rows}


def main() -> None:
    parser = program(__doc__, "gpu")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does everything run?")
    parser.add_argument("--only", nargs="+", metavar="PART[:SECONDS]", help=f"some of: {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=7.8, help="for all parts together")
    parser.add_argument("--folder", type=Path, default=WORK / "gpu", help="for checkpoints: 60 GB, of a fast disk")
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device; --device cpu:0 --quick rehearses on a simulated one")
    given.folder.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + 60 * given.minutes
    parts: list[dict[str, Any]] = []
    for name in given.only or PARTS:
        left = end - time.perf_counter()
        part = run_part(name, given, left) if left > 10 else {"part": name, "ended": "no time left", "rows": []}
        parts.append(part)
        write_result("gpu", parts, RESULTS / f"{given.name}.json", device=given.device, quick=given.quick)
        print_table(part["rows"], list(dict.fromkeys(key for row in part["rows"] for key in row)))
    sys.exit(any(part["ended"].startswith("exit") or not part["rows"] for part in parts))


if __name__ == "__main__":
    main()
