"""How long does a merge by a few inputs take, in how much memory, and which share of the answers does it keep?

    python -m benchmarks.inputs --base BASE sst2=ADAPTER:PROMPTS[:QUESTIONS] ...

For 1, 8 and 64 prompts of each expert: `actmat merge --data PROMPTS` on two threads. Answers are compared on the
prompts that were held back (of one prompt, on this one). QUESTIONS, other prompts of the task with a column
`answer`, are asked after all merges, with `actmat verify --check`; that is not timed.
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
COLUMNS = ("prompts", "expert", "wall_s", "cpu_s", "peak_gib", "kept", "average_kept", "compared", "load")
ASKED = ("accuracy", "expert_accuracy", "average_accuracy", "questions")


def rows_of(base: str, experts: list[list[str]], prompts: int, out: Path) -> list[dict[str, Any]]:
    """A row for each expert; time and memory are of the whole merge."""
    load = os.getloadavg()[0]
    command = [*actmat_command(), "merge", "-b", base, "--out", str(out), "--diagnose", "--quiet"]
    command += ["--set", f"samples={prompts}", "--set", "new_tokens=4"]
    for name, adapter, data, *_ in experts:
        command += ["-e", f"{name}={adapter}", "--data", f"{name}={data}"]
    run = measure(command, OMP_NUM_THREADS="2", **SOURCE)
    found = json.loads((out / "report.json").read_text(encoding="utf-8"))["agreement"]
    whole = {"wall_s": run.wall_s, "cpu_s": run.cpu_s, "peak_gib": run.peak_anonymous_b / GIB, "load": load}
    return [
        {
            "prompts": prompts, "expert": row["expert"], "kept": 1 - row["disagreement"],
            "average_kept": row["average"], "compared": row["inputs"], **whole,
        }
        for row in found
    ]  # fmt: skip


def asked(experts: list[list[str]], out: Path) -> list[dict[str, Any]]:
    """Accuracies on the questions, a row for each expert."""
    command = [*actmat_command(), "verify", str(out), "--json"]
    command += [x for name, _, _, questions in experts for x in ("--check", f"{name}={questions}")]
    done = subprocess.run(command, capture_output=True, check=True, text=True, env={**os.environ, **SOURCE})
    rows = json.loads(done.stdout)["answers"]
    return [dict(zip(ASKED, (*row["accuracy"], row["inputs"]), strict=True)) for row in rows]


def main() -> None:
    """Merge by 1, 8 and 64 prompts, and write benchmarks/results/inputs.json."""
    parser = program(__doc__, "inputs")
    parser.add_argument("--base", required=True, help="folder of the model under the adapters")
    parser.add_argument("experts", nargs="+", help="NAME=ADAPTER:PROMPTS[:QUESTIONS]")
    given = parser.parse_args()
    experts = [[name, *rest.split(":")] for name, _, rest in (text.partition("=") for text in given.experts)]
    are_asked = all(len(e) == 4 for e in experts)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for n in NUMBERS for row in rows_of(given.base, experts, n, Path(folder) / str(n))]
        more = [row for n in NUMBERS for row in asked(experts, Path(folder) / str(n))] if are_asked else []
    rows = [row | other for row, other in zip(rows, more, strict=True)] if more else rows
    finish(given.name, rows, (*COLUMNS, *(ASKED if more else ())))


if __name__ == "__main__":
    main()
