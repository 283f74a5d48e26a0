"""How long does a merge by a few inputs take, in how much memory, and which share of the answers does it keep?

    python -m benchmarks.inputs --base BASE --data FOLDER   # of adapters FOLDER/TASK, TASK.jsonl, TASK.test.jsonl

For 1, 8 and 64 prompts of each expert, from TASK.jsonl: `actmat merge --data` on two threads, from the start of the
process to the printed answers. The questions of TASK.test.jsonl, with a column `answer`, are asked afterwards with
`actmat verify --check`, which is not timed: accuracies and the share of answers kept are of these.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import GIB, SOURCE, actmat_command, finish, measure, program

NUMBERS = (1, 8, 64)
COLUMNS = ("prompts", "wall_s", "cpu_s", "peak_gib", "load", "expert", "accuracy", "expert_accuracy",
           "average_accuracy", "kept", "low", "high", "average_kept", "questions")  # fmt: skip

LIMIT_S = 900
"""Limit of one `verify --check`, of 64 questions per expert: 2 minutes on two quiet cores, more on busy ones."""


def rows_of(base: str, data: Path, prompts: int, out: Path) -> list[dict[str, Any]]:
    """A row for each expert; time and memory are of the whole merge."""
    load = os.getloadavg()[0]
    command = [*actmat_command(), "merge", "-b", base, "--out", str(out), "--set", f"samples={prompts}"]
    tasks = sorted(file.name.removesuffix(".test.jsonl") for file in data.glob("*.test.jsonl"))
    for name in tasks:
        command += ["-e", f"{name}={data / name}", "--data", f"{name}={data / name}.jsonl"]
    run = measure(command, OMP_NUM_THREADS="2", **SOURCE)
    asked = [*actmat_command(), "verify", str(out), "--json"]
    asked += [x for name in tasks for x in ("--check", f"{name}={data / name}.test.jsonl")]
    print(f"{prompts} prompts: {run.wall_s:.1f} s; asking {', '.join(tasks)}", flush=True)
    said = subprocess.check_output(asked, text=True, timeout=LIMIT_S, env={**os.environ, **SOURCE})
    whole = (prompts, run.wall_s, run.cpu_s, run.peak_anonymous_b / GIB, load)
    rows = []
    for row in json.loads(said)["answers"]:
        kept = (1 - row["disagreement"], row["low"], row["high"], row["average"], row["inputs"])
        rows.append(dict(zip(COLUMNS, (*whole, row["expert"], *row["accuracy"], *kept), strict=True)))
    return rows


def main() -> None:
    """Merge by 1, 8 and 64 prompts, and write benchmarks/results/inputs.json."""
    parser = program(__doc__, "inputs")
    parser.add_argument("--base", required=True, help="folder of the model under the adapters")
    parser.add_argument("--data", type=Path, required=True, help="adapters, prompts and questions")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for n in NUMBERS for row in rows_of(given.base, given.data, n, Path(folder) / str(n))]
    finish(given.name, rows, COLUMNS, command="python -m benchmarks.inputs --base BASE --data FOLDER")


if __name__ == "__main__":
    main()
