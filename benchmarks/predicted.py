"""Is a predicted time true? Merges of a small Llama, each against the prediction from a calibration of the same run.

    python -m benchmarks.predicted
    python -m benchmarks.predicted --hidden 1024 --intermediate 2816 --repeats 5

Whole processes are measured. `cpu` is the computing time of all threads, which other work on the machine prolongs
least, against all work and the start; `wall` is the time from start to exit, against the simulated makespan. Inputs lie
in the system's memory, so that reading counts at that rate. The last line is the geometric mean of the ratios with its
95 % t interval.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
from pathlib import Path
from typing import Any

from actmat.api import plan
from actmat.api.calibrating import calibrate
from actmat.timing.predict import predict
from benchmarks.common import HERE, WORK, Run, actmat_command, fresh, markdown, measure, write_result
from benchmarks.make_llama import add_size_arguments, home, make_family, size_from

COLUMNS = ("merge", "threads", "predicted_cpu_s", "cpu_s", "cpu_ratio", "predicted_wall_s", "wall_s", "wall_ratio",
           "load")  # fmt: skip
MERGES = (
    ("actmat", 1), ("actmat", 2), ("actmat_ridge", 1), ("tsv", 1), ("iso_c", 1), ("ties", 1), ("average", 1),
)  # fmt: skip
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""95 % quantiles of Student's t for a mean of so many numbers."""


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios, and its 95 % interval."""
    logs = [math.log(r) for r in ratios]
    mean = statistics.mean(logs)
    wide = T95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - wide), math.exp(mean + wide)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="predicted", help="name of the result file")
    add_size_arguments(parser)
    parser.set_defaults(hidden=768, intermediate=2048, layers=2, heads=12, vocabulary=4000)
    given = parser.parse_args()
    size = size_from(given)
    base, experts = make_family(home(WORK, size, "bfloat16"), size, given.experts, dtype="bfloat16")
    rates = calibrate(folder=WORK, note=print)
    rates = dataclasses.replace(rates, rates=dataclasses.replace(rates.rates, disk_read=rates.rates.cached_read))

    def merge(method: str, threads: int) -> Run:
        out = fresh(WORK / "out" / "predicted")
        command: list[str | Path] = [*actmat_command(), "merge", "--base", base, "--method", method]
        for expert in experts:
            command += ["--expert", expert]
        command += ["--out", out, "--threads", str(threads), "--quiet"]
        return measure(command, None, PYTHONPATH=str(HERE.parent / "src"))

    rows: list[dict[str, Any]] = []
    for method, threads in MERGES:
        found = predict(plan(base, experts, method=method), rates, f"1x{threads}")
        runs = [merge(method, threads) for _ in range(given.repeats)]
        cpu, wall = (statistics.median(getattr(r, n) for r in runs) for n in ("cpu_s", "wall_s"))
        planned = found.work_s + rates.rates.start_s
        rows.append(
            {
                "merge": method,
                "threads": threads,
                "predicted_cpu_s": planned,
                "cpu_s": cpu,
                "cpu_ratio": cpu / planned,
                "predicted_wall_s": found.simulation.makespan_s,
                "wall_s": wall,
                "wall_ratio": wall / found.simulation.makespan_s,
                "load": os.getloadavg()[0],
                "all_cpu_s": [round(r.cpu_s, 3) for r in runs],
                "all_wall_s": [round(r.wall_s, 3) for r in runs],
            }
        )
        print(markdown(rows[-1:], COLUMNS), flush=True)
    for kind in ("cpu", "wall"):
        mean, low, high = interval([r[f"{kind}_ratio"] for r in rows[: len(MERGES)]])
        rows.append({"merge": f"all: measured / predicted {kind}", f"{kind}_ratio": mean, "low": low, "high": high})
    columns = (*COLUMNS, "low", "high")
    rows = [dict.fromkeys(columns) | row for row in rows]
    print(markdown(rows, columns))
    print(write_result(given.name, rows, experts=given.experts, rates=rates.to_json(), columns=columns))


if __name__ == "__main__":
    main()
