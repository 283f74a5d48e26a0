"""The summary of the demo's accuracies, from the file that `actmat demo` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "demo.json"


def demo_table(table: Callable[[list[str], list[list[str]]], str]) -> str:
    """Mean test accuracy of base, average, all other merges (lowest to highest) and experts.

    Args:
        table: header and rows -> Markdown.
    """
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = {row["name"]: row["average"] for row in found["rows"]}
    base, average, experts = (f"{100 * rows[name]['value']:.1f}" for name in ("base", "average", "experts"))
    others = [100 * rows[row["name"]]["value"] for row in found["rows"] if row["kind"] == "merged"]
    shown = {n: row for n, row in rows.items() if n != "majority"}
    half = max((row["high"] - row["low"]) / 2 for row in shown.values())
    titles = ["base", "`average`", f"all {len(others)} merges", "each expert on its own task"]
    cells = [base, average, f"{min(others):.1f} to {max(others):.1f}", experts]
    tested = f"{len(found['tasks'])} tasks, {found['n_photographs']['test']} photographs, seed {found['seed']}"
    return table(titles, [cells]) + f"\nAccuracy in %, mean of {tested}; 95 % intervals: ±{100 * half:.1f} or less.\n"
