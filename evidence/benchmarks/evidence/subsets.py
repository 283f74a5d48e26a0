"""Merges of the first two to seven experts of a suite."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from benchmarks.common import read_lines
from benchmarks.evidence.group import SUITES, is_known


def subset_file(folder: Path, suite: str) -> Path:
    """One line per row, number of experts and task."""
    return folder / f"{suite}-subsets.jsonl"


SUBSET_HEAD = ["experts", "row", "seeds", *(f"of {n}" for n in range(2, 8))]


def subset_rows(folder: Path) -> list[list[str]]:
    """Mean test accuracy over seeds and the merged experts' tasks, by row and number of experts."""
    found = []
    for suite in SUITES:
        by_row: dict[tuple[str, str], dict[int, dict[tuple[int, str], float]]] = {}
        for row in (x for x in read_lines(subset_file(folder, suite)) if is_known(x["method"])):
            title = f"{suite}, {row['model']}, {row['regime']}"
            points = by_row.setdefault((title, row["method"]), {}).setdefault(row["experts"], {})
            points[row["seed"], row["task"]] = 100 * row["correct"] / row["total"]
        for (title, method), some in by_row.items():
            seeds = sorted({seed for points in some.values() for seed, _ in points})
            cells = [f"{mean(some[n].values()):.1f}" if n in some else "" for n in range(2, 8)]
            found.append([title, f"`{method}`", ", ".join(map(str, seeds)), *cells])
    return found
