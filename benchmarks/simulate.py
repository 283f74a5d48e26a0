"""How well would plans of large models fill 2 to 256 workers? Simulated from headers, at the rates of this machine.

    python -m benchmarks.simulate
    python -m benchmarks.simulate --models llama-3.1-8b --methods actmat_ridge --workers 2 64 --rates rates.json

Machines of 8 workers share storage of 1 GB/s per worker. `ideal` is the larger of all work over the number of workers
and all bytes over the bandwidth. Columns are efficiencies, ideal over simulated time, per number of workers. For the
first below 0.90 the cause is named: a unit, with the part of its time that no other worker can take over, or storage
and computing by turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actmat.api.calibrating import calibrate
from actmat.experts.checkpoint import CheckpointExpert
from actmat.planning import MergePlan, build_plan
from actmat.recipe import make_recipe
from actmat.timing.predict import predict
from actmat.timing.rates import Rates, load_rates
from benchmarks.common import markdown, write_result
from benchmarks.model_shapes import MODELS, HeadersOnly, parameters, shapes_of

PER_NODE = 8
WORKERS = (2, 4, 8, 16, 32, 64, 128, 256)
GOOD = 0.90


def headers_plan(model: str, method: str, experts: int = 3) -> MergePlan:
    """The plan of a merge of experts of a model, from shapes."""
    shapes = shapes_of(model)
    names = [f"expert-{t}" for t in range(experts)]
    fields: dict[str, Any] = {"base": model, "experts": names, "method": method, "out": "merged"}
    given = [CheckpointExpert(HeadersOnly(name, shapes)) for name in names]
    return build_plan(make_recipe(fields), HeadersOnly(model, shapes), given)


def runs_of(plan: MergePlan, rates: Rates, counts: Sequence[int]) -> list[dict[str, Any]]:
    """A simulated run for each number of workers."""
    runs = []
    for workers in counts:
        nodes, each = (1, workers) if workers <= PER_NODE else (workers // PER_NODE, PER_NODE)
        found = predict(plan, rates, f"{nodes}x{each}", bandwidth=f"{workers}GB")
        s = found.simulation
        runs.append(
            {
                "workers": workers,
                "hours": s.makespan_s / 3600,
                "ideal_hours": s.ideal_s / 3600,
                "efficiency": s.efficiency,
                "limited_by": found.limit,
                "peak_b": max(s.peak_bytes),
                "work_hours": found.work_s / 3600,
            }
        )
    return runs


def row_of(plan: MergePlan, model: str, method: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Efficiencies of all runs in one row, and what limits the first that is below the bar."""
    poor = next((r for r in runs if r["efficiency"] < GOOD), None)
    limit = "-" if poor is None else poor["limited_by"]
    row = {
        "model": model,
        "method": method,
        "units": sum(i.action != "tie" for i in plan.items),
        "work_hours": runs[0]["work_hours"],
    }
    return row | {f"{r['workers']}": round(r["efficiency"], 3) for r in runs} | {"limited_by": limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=["actmat", "actmat_ridge", "average"])
    parser.add_argument("--workers", nargs="+", type=int, default=list(WORKERS))
    parser.add_argument("--rates", type=Path, help="of another machine; default: this one is calibrated")
    parser.add_argument("--name", default="simulate", help="name of the result file")
    given = parser.parse_args()
    rates = load_rates(given.rates) if given.rates else calibrate()
    rows: list[dict[str, Any]] = []
    runs: dict[str, list[dict[str, Any]]] = {}
    columns = ["model", "method", "units", "work_hours", *map(str, given.workers), "limited_by"]
    for model in given.models:
        for method in given.methods:
            plan = headers_plan(model, method)
            found = runs[f"{model} {method}"] = runs_of(plan, rates, given.workers)
            rows.append(row_of(plan, model, method, found))
            print(markdown(rows[-1:], columns), flush=True)
    sizes = {model: parameters(shapes_of(model)) for model in given.models}
    print(write_result(given.name, rows, parameters=sizes, runs=runs, rates=rates.to_json(), columns=columns))


if __name__ == "__main__":
    main()
