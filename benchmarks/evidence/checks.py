"""Do the checks of `actmat diagnose` sort good merges from bad ones? Findings of every row beside its test accuracy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import actmat
from actmat_experiments.harness.experiment import Experiment
from benchmarks.evidence.group import Group
from benchmarks.evidence.intervals import interval, paired

HEAD = ["experts", "seed", "row", "length", "issues", "default scale", "- average"]


def check_file(folder: Path, suite: str) -> Path:
    """One line per row of a suite's experts."""
    return folder / f"{suite}-checks.jsonl"


def findings(experiment: Experiment, rows: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Codes of the issues that `diagnose` finds, and the merged delta's norm over the experts' mean norm (RMS)."""
    experts = [{"name": name, "path": str(made.path)} for name, made in experiment.experts().items()]
    for row in rows:
        found = actmat.diagnose(experiment.base.path, experts, method=row, threads=1)
        merged = math.hypot(*(m.merged_norm for m in found.measures))
        squares = [math.hypot(*m.norms) / math.sqrt(len(m.norms)) for m in found.measures]
        yield {
            "suite": experiment.suite,
            "model": experiment.model,
            "regime": experiment.regime,
            "seed": experiment.seed,
            "settings": experiment.digest,
            "method": row,
            "issues": [check.code for check in found.issues],
            "length": round(merged / math.hypot(*squares), 4),
        }


def check_rows(groups: Sequence[Group], folder: Path) -> list[list[str]]:
    """Rows in the order of their test accuracy, by group and seed."""
    found = []
    for group in groups:
        path = check_file(folder, group.suite)
        lines = [json.loads(x) for x in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
        for row in group.rows():
            for line in lines:
                if (line["model"], line["regime"], line["method"]) != (group.model, group.regime, row):
                    continue
                points, average = group.points(row), group.points("average")
                own = {s: p for s, p in points.items() if s == line["seed"]}
                gap = paired(own, average) if own and row != "average" else None
                found.append(
                    [
                        *(f"{group.suite}, {group.title}", str(line["seed"]), f"`{row}`", f"{line['length']:.2f}"),
                        ", ".join(line["issues"]) or "none",
                        f"{interval(own).mean:.1f}" if own else "",
                        f"{gap.mean:+.1f}" if gap else "",
                    ]
                )
    return found
