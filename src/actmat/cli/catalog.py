"""The declarations of all methods as a file of the package, so that listing them does not import torch.

`python -m docs.generate` writes the file; a test compares it with the declarations.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from actmat.plugins import removed

if TYPE_CHECKING:
    from actmat.methods import MergeMethod

FILE = "methods.json"


def read_catalog() -> dict[str, dict[str, Any]]:
    """Method name -> declaration, in the order of `all_methods`; methods of a removed extra are left out."""
    text = files("actmat.cli").joinpath(FILE).read_text(encoding="utf-8")
    return {entry["name"]: entry for entry in json.loads(text) if entry["name"] not in removed("actmat.methods")}


SIDE, EXPERTS = 4096, 4
"""The layer and the number of experts for which costs are shown."""


def gflop(m: MergeMethod) -> float:
    """Rough cost of a method on the reference layer in GFLOP; with fewer experts for methods that take fewer."""
    experts = min(EXPERTS, m.max_experts or EXPERTS)
    return round(m.cost.operations((SIDE, SIDE), experts, m.resolve_options({})) / 1e9, 3)


def shown(gflop: float) -> str:
    """Format a cost with three significant digits.

    >>> shown(0.0671), shown(3056.2)
    ('0.0671', '3,060')
    """
    return f"{float(f'{gflop:.3g}'):,.0f}" if gflop >= 100 else f"{gflop:.3g}"


def describe(m: MergeMethod) -> dict[str, Any]:
    """Convert a declaration to plain data."""
    return {
        "name": m.name,
        "summary": m.text.summary,
        "equation": m.text.equation,
        "acts_on": m.acts_on,
        "needs": {"data": list(m.needs_statistics), "base": m.needs_base}
        | {"takes_weights": m.is_weighted, "weights_need_overlap": m.meets_all(m.resolve_options({}))}
        | {"random": m.is_random},
        "low_rank": m.lowrank is not None,
        "preset_of": m.preset_of,
        "gflop": gflop(m),
        "laws": sorted(m.laws),
        "notes": m.text.notes,
        "source": m.text.source,
        "options": [
            {"name": o.name, "type": o.type_name, "default": o.default}
            | {"bounds": str(o.bounds) if o.bounds else None, "description": o.doc}
            for o in m.options.values()
        ],
    }
