"""The table of the demo's accuracies, from the file that `actmat demo` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "demo.json"
SHOWN = ("average", "ties", "tsv", "actmat", "actmat_ridge", "aswudi")
"""Methods of the table, in its order: two that add, and what the evidence on larger models puts first."""


def demo_table(table: Callable[[list[str], list[list[str]]], str]) -> str:
    """Mean test accuracy of base, merges and experts, with half of its 95 % interval.

    Args:
        table: header and rows -> Markdown.
    """
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = {row["name"]: row["average"] for row in found["rows"]}
    names = ["base", *SHOWN, "experts"]
    titles = ["base", *(f"`{name}`" for name in SHOWN), "each expert on its own task"]
    cells = [f"{100 * rows[n]['value']:.1f}" for n in names]
    half = max((rows[n]["high"] - rows[n]["low"]) / 2 for n in names)
    tested = f"{len(found['tasks'])} tasks, {found['n_photographs']['test']} photographs, seed {found['seed']}"
    return table(titles, [cells]) + f"\n% right, mean of {tested}; 95 % intervals: ±{100 * half:.1f} or less.\n"
