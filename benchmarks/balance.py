"""How evenly do the tensors of large models divide over 2 to 256 parts? From headers, by planned cost.

    python -m benchmarks.balance
    python -m benchmarks.balance --models llama-3.1-8b --methods actmat_ridge --parts 2 64

Every tensor is one unit and goes to one part, as `actmat merge --part` shares them out. Columns are efficiencies per
number of parts: the mean cost of a part over that of the dearest. `longest` is the largest tensor's share of all
work: with more parts than its inverse, it decides. Workers of one machine do better, since they help each other with
wide matrices.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from actmat.engine.units import plan_units
from actmat.experts.checkpoint import CheckpointExpert
from actmat.extras.parts.shares import share_units, work_of
from actmat.planning import MergePlan, build_plan
from actmat.recipe import make_recipe
from benchmarks.common import markdown, write_result
from benchmarks.model_shapes import MODELS, HeadersOnly, parameters, shapes_of

PARTS = (2, 4, 8, 16, 32, 64, 128, 256)


def headers_plan(model: str, method: str, experts: int = 3) -> MergePlan:
    """The plan of a merge of experts of a model, from shapes."""
    shapes = shapes_of(model)
    names = [f"expert-{t}" for t in range(experts)]
    fields: dict[str, Any] = {"base": model, "experts": names, "method": method, "out": "merged"}
    given = [CheckpointExpert(HeadersOnly(name, shapes)) for name in names]
    return build_plan(make_recipe(fields), HeadersOnly(model, shapes), given)


def row_of(plan: MergePlan, model: str, method: str, counts: Sequence[int]) -> dict[str, Any]:
    """Efficiencies for all numbers of parts, and the longest unit."""
    units = plan_units([plan], [()], None)
    work = sum(map(work_of, units))
    longest = max(units, key=work_of)
    row = {"model": model, "method": method, "units": len(units), "work_hours": plan.seconds / 3600}
    for count in counts:
        dearest = max(sum(map(work_of, share)) for share in share_units(units, count))
        row[str(count)] = round(work / (count * dearest), 3)
    return row | {"longest": work_of(longest) / work, "tensor": longest.name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=["actmat", "actmat_ridge", "average"])
    parser.add_argument("--parts", nargs="+", type=int, default=list(PARTS))
    parser.add_argument("--name", default="balance", help="name of the result file")
    given = parser.parse_args()
    rows = []
    for model in given.models:
        for method in given.methods:
            rows.append(row_of(headers_plan(model, method), model, method, given.parts))
            print(markdown(rows[-1:], list(rows[-1])), flush=True)
    print(write_result(given.name, rows, parameters={m: parameters(shapes_of(m)) for m in given.models}))


if __name__ == "__main__":
    main()
