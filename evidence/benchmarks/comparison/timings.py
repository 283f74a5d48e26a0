"""Time and memory of the same merges by two source trees, in pairs, and the ratios of the pairs."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.adapters import write_adapters
from benchmarks.common import WORK, Run, alternate, fresh, measure
from benchmarks.comparison.trees import Tree
from benchmarks.make_llama import Size, home, make_family

SIZES = {
    "small": Size(hidden=512, intermediate=1408, layers=10, heads=8, key_value_heads=4),
    "medium": Size(hidden=1024, intermediate=2816, layers=18),
}
MATRICES = Size(hidden=1024, intermediate=2816, layers=1, heads=16, vocabulary=1000)
ELEMENTWISE = {"average": 2, "task_arithmetic": 3, "ties": 3, "dare": 3, "model_stock": 3}
"""Methods that are measured on the whole model, and the number of their experts."""

MEASURES = ("wall_s", "cpu_s", "peak_anonymous_b", "peak_resident_b")
COLUMNS = ("merge", "measure", "old", "new", "ratio", "low", "high", "judged")
BOUND = 1.05
"""Ratio up to which a change counts as free."""


def commands(size: str) -> dict[str, Callable[[], list[str | Path]]]:
    """Arguments of the merges by name, `--out` left out; calling one makes its inputs where they are missing."""
    return {
        **{method: lambda m=method: _full(SIZES[size], m, ELEMENTWISE[m], "all") for method in ELEMENTWISE},
        "actmat": lambda: _full(MATRICES, "actmat", 2, "linear"),
        "lora": _lora,
    }


def _full(size: Size, method: str, experts: int, scope: str) -> list[str | Path]:
    base, paths = make_family(home(WORK, size, "bfloat16"), size, experts, dtype="bfloat16")
    return ["-b", base, *_flags(paths), "-m", method, "--set", f"scope={scope}"]


def _lora() -> list[str | Path]:
    return [*_flags(write_adapters(WORK / "against-adapters", 4, 16, 1024, 2816, 8)), "-m", "actmat"]


def _flags(experts: Sequence[Path]) -> list[str | Path]:
    return [flag for path in experts for flag in ("-e", path)]


def timed_pairs(trees: Sequence[Tree], name: str, arguments: Sequence[str | Path], rounds: int) -> list[dict[str, Any]]:
    """Rows of one merge, one for each of `MEASURES`: run by each tree in turn, after one round that is not counted."""

    def merge(tree: Tree) -> Run:
        out = fresh(WORK / "out" / f"against-{tree.name}")
        written = ["--out", out, "--set", "durable=false", "--quiet"]
        command = [sys.executable, "-m", "actmat", "merge", *arguments, *written]
        return measure(command, **tree.environment())

    for tree in trees:
        merge(tree)
    found = alternate({tree.name: lambda tree=tree: merge(tree) for tree in trees}, rounds)
    return [
        {"merge": name, "measure": measure_}
        | ratio_row(*([getattr(run, measure_) for run in found[tree.name]] for tree in trees))
        for measure_ in MEASURES
    ]


def ratio_row(old: Sequence[float], new: Sequence[float]) -> dict[str, Any]:
    """Medians of both, the mean ratio new/old of the pairs with its interval, the judgment, and every value."""
    ratio, low, high = paired_ratio(old, new)
    return {
        "old": statistics.median(old),
        "new": statistics.median(new),
        "ratio": ratio,
        "low": low,
        "high": high,
        "judged": judgment(low, high),
        "all_old": [round(value, 4) for value in old],
        "all_new": [round(value, 4) for value in new],
    }


def paired_ratio(old: Sequence[float], new: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Geometric mean of new/old over the pairs, and its 95 % t interval (of the logarithms); None with one pair."""
    logs = [math.log(b / a) for a, b in zip(old, new, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return math.exp(mean), None, None
    from scipy.stats import t

    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def judgment(low: float | None, high: float | None) -> str:
    """`dearer` where the whole interval lies above `BOUND`, `not dearer` where none of it does, else `unclear`."""
    if low is None or high is None:
        return "unclear"
    return "dearer" if low > BOUND else "not dearer" if high <= BOUND else "unclear"


def readable(row: dict[str, Any]) -> dict[str, Any]:
    """The row with medians in seconds or GiB, as the measure's name says, for a table."""
    kind = row["measure"][-2:]
    divisor = 1 << 30 if kind == "_b" else 1
    words = row["measure"].removesuffix(kind).replace("_", " ")
    unit = "GiB" if kind == "_b" else "s"
    return row | {"measure": f"{words}, {unit}", "old": row["old"] / divisor, "new": row["new"] / divisor}
