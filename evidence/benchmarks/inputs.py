"""How long does a merge by a few inputs take, in how much memory, and which share of the answers does it keep?

    python -m benchmarks.inputs --base BASE --data FOLDER   # of adapters FOLDER/TASK, TASK.jsonl, TASK.test.jsonl

For 1, 8 and 64 prompts of each expert, from TASK.jsonl: `actmat merge --data` on two threads, from the start of the
process to the printed answers. The questions of TASK.test.jsonl, with a column `answer`, are asked afterwards with
`actmat verify --check`, which is not timed: accuracies and the share of answers kept are of these.

    python -m benchmarks.inputs --tune --base BASE --data FOLDER

For 8 and 64 prompts, `actmat tune`: seconds to the note on the first merge, and to the end.
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
COLUMNS = ("prompts", "wall_s", "cpu_s", "peak_gib", "load", "verdict", "expert", "accuracy", "without_accuracy",
           "average_accuracy", "expert_accuracy", "kept", "low", "high", "without_kept", "average_kept",
           "questions")  # fmt: skip
TUNE_COLUMNS = ("prompts", "first_s", "wall_s", "cpu_s", "peak_gib", "load")

LIMIT_S = 900
"""Limit of one `verify --check`, of 64 questions per expert: 2 minutes on two quiet cores, more on busy ones."""


def command_of(base: str, data: Path, out: Path, *words: str) -> tuple[list[str], list[str]]:
    """A command of `actmat` with prompts of each expert, and the names of the experts."""
    tasks = sorted(file.name.removesuffix(".test.jsonl") for file in data.glob("*.test.jsonl"))
    given = [x for t in tasks for x in ("-e", f"{t}={data / t}", "--data", f"{t}={data / t}.jsonl")]
    return [*actmat_command(), *words, "-b", base, "--to", "peft", "--out", str(out), *given], tasks


def tune_rows(base: str, data: Path, prompts: int, out: Path) -> list[dict[str, Any]]:
    """Times of a search."""
    load = os.getloadavg()[0]
    command, _ = command_of(base, data, out, "tune", "--set", f"samples={prompts}")
    run = measure(command, "the first merge", OMP_NUM_THREADS="2", **SOURCE)
    costs = (run.marked_s, run.wall_s, run.cpu_s, run.peak_anonymous_b / GIB, load)
    return [dict(zip(TUNE_COLUMNS, (prompts, *costs), strict=True))]


def rows_of(base: str, data: Path, prompts: int, out: Path) -> list[dict[str, Any]]:
    """A row for each expert; time and memory are of the whole merge."""
    load = os.getloadavg()[0]
    command, tasks = command_of(base, data, out, "merge", "--set", f"samples={prompts}")
    run = measure(command, OMP_NUM_THREADS="2", **SOURCE)
    asked = [*actmat_command(), "verify", str(out), "--json"]
    asked += [x for name in tasks for x in ("--check", f"{name}={data / name}.test.jsonl")]
    print(f"{prompts} prompts: {run.wall_s:.1f} s; asking {', '.join(tasks)}", flush=True)
    said = subprocess.check_output(asked, text=True, timeout=LIMIT_S, env={**os.environ, **SOURCE})
    verdict = json.loads((out / "actmat_manifest.json").read_text())["verdict"]
    whole = (prompts, run.wall_s, run.cpu_s, run.peak_anonymous_b / GIB, load, verdict)
    rows = []
    for row in json.loads(said)["answers"]:
        merges = [row, row["without"], row["average"]]
        accuracy = [*(m["accuracy"] for m in merges), row["expert_accuracy"]]
        kept, without, average = (m["kept"] / row["inputs"] for m in merges)
        values = (*whole, row["expert"], *accuracy, kept, row["low"], row["high"], without, average, row["inputs"])
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def main() -> None:
    """Merge by 1, 8 and 64 prompts, and write evidence/results/inputs.json."""
    parser = program(__doc__, "inputs")
    parser.add_argument("--base", required=True, help="folder of the model under the adapters")
    parser.add_argument("--data", type=Path, required=True, help="adapters, prompts and questions")
    parser.add_argument("--tune", action="store_true", help="searches, in place of merges")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        benchmark, numbers = (tune_rows, NUMBERS[1:]) if given.tune else (rows_of, NUMBERS)
        rows = [row for n in numbers for row in benchmark(given.base, given.data, n, Path(folder) / str(n))]
    name, columns, flag = ("inputs-tune", TUNE_COLUMNS, "--tune ") if given.tune else (given.name, COLUMNS, "")
    finish(name, rows, columns, command=f"python -m benchmarks.inputs {flag}--base BASE --data FOLDER")


if __name__ == "__main__":
    main()
