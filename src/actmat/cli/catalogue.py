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


def read_catalogue() -> dict[str, dict[str, Any]]:
    """Declarations by the name of the method, in the order of `all_methods`, without those of a removed extra."""
    text = files("actmat.cli").joinpath(FILE).read_text(encoding="utf-8")
    return {entry["name"]: entry for entry in json.loads(text) if entry["name"] not in removed("actmat.methods")}


def describe(m: MergeMethod) -> dict[str, Any]:
    """A declaration as plain data."""
    return {
        "name": m.name,
        "summary": m.about.summary,
        "equation": m.about.equation,
        "acts_on": m.acts_on,
        "needs": {"data": list(m.needs_statistics), "base": m.needs_base}
        | {"takes_weights": m.is_weighted, "weights_need_overlap": m.meets_all(m.resolve_options({}))}
        | {"random": m.is_random},
        "low_rank": m.lowrank is not None,
        "preset_of": m.about.preset_of,
        "flops": m.cost.flops,
        "laws": sorted(m.laws),
        "reference": m.about.reference,
        "options": [
            {"name": o.name, "type": o.type_name, "default": o.default}
            | {"bounds": str(o.bounds) if o.bounds else None, "description": o.doc}
            for o in m.options.values()
        ],
    }
