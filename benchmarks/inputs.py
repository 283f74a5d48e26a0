"""How long does a merge by a few inputs take, in how much memory, and which share of the answers does it keep?

    python -m benchmarks.inputs --base BASE sst2=ADAPTER:PROMPTS:QUESTIONS ...

For 1 and 8 prompts of each expert: `actmat merge --data PROMPTS --check QUESTIONS` on two threads. An expert is a name,
an adapter, a file of prompts, and a file of other prompts of the task, with a column `answer` if accuracy is wanted.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import SOURCE, actmat_command, finish, measure, program

GIB = 1 << 30
COLUMNS = ("prompts", "expert", "wall_s", "peak_gib", "kept", "average_kept", "accuracy", "expert_accuracy", "load")


def rows_of(base: str, experts: list[list[str]], prompts: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each expert; time and memory are of the whole merge."""
    out, load = folder / str(prompts), os.getloadavg()[0]
    command = [*actmat_command(), "merge", "-b", base, "--out", str(out), "--diagnose", "--quiet"]
    command += ["--set", f"samples={prompts}", "--set", "new_tokens=4"]
    for name, adapter, data, check in experts:
        command += ["-e", f"{name}={adapter}", "--data", f"{name}={data}", "--check", f"{name}={check}"]
    run = measure(command, OMP_NUM_THREADS="2", **SOURCE)
    found = json.loads((out / "report.json").read_text(encoding="utf-8"))["agreement"]
    return [
        {
            "prompts": prompts, "expert": row["expert"], "wall_s": run.wall_s, "peak_gib": run.peak_anonymous_b / GIB,
            "kept": 1 - row["disagreement"], "average_kept": row["average"],
            "accuracy": next(iter(row["accuracy"]), None), "expert_accuracy": next(iter(row["accuracy"][1:]), None),
            "questions": row["inputs"], "load": load,
        }
        for row in found
    ]  # fmt: skip


def main() -> None:
    """Merge by 1 and by 8 prompts, and write benchmarks/results/inputs.json."""
    parser = program(__doc__, "inputs")
    parser.add_argument("--base", required=True, help="folder of the model under the adapters")
    parser.add_argument("experts", nargs="+", help="NAME=ADAPTER:PROMPTS:QUESTIONS")
    given = parser.parse_args()
    experts = [[name, *rest.split(":")] for name, _, rest in (text.partition("=") for text in given.experts)]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for n in (1, 8) for row in rows_of(given.base, experts, n, Path(folder))]
    finish(given.name, rows, COLUMNS)


if __name__ == "__main__":
    main()
