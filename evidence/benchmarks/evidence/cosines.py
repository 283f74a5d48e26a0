"""Cosines of `D^T D` with measured Gram matrices, by kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import read_lines
from benchmarks.evidence.group import REGIMES, SUITES, Group

HEAD = ["experts", "layer", "n", "`D^T D`", "identity", "`D^T D` nearer", "change of weights"]
Row = Mapping[str, Any]


def _means(rows: list[Row]) -> list[str]:
    return [
        f"{mean(r['estimate'] for r in rows):.2f}",
        f"{mean(r['identity'] for r in rows):.2f}",
        f"{100 * mean(r['estimate'] > r['identity'] for r in rows):.0f} %",
        f"{100 * mean(r['change'] for r in rows):.2f} %",
    ]


def kind_rows(folder: Path) -> list[list[str]]:
    """Mean cosines by suite, regime and kind of layer; in how many layers and experts the estimate is nearer.

    Of the settings that were run last, as in `Group`.
    """
    by_kind: dict[tuple[str, str], list[Row]] = {}
    for suite in SUITES:
        rows = read_lines(folder / f"{suite}-gram.jsonl")
        last = {(row["model"], row["regime"]): row["settings"] for row in rows}
        for row in rows:
            if row["settings"] != last[row["model"], row["regime"]]:
                continue
            kind = ".".join(p for p in row["tensor"].split(".") if not p.isdigit() and p != "weight")
            title = f"{row['suite']}, {row['model']}, {row['regime']}"
            by_kind.setdefault((title, kind.removeprefix("encoder.layer.")), []).append(row)
    return [[title, f"`{kind}`", str(len(rows)), *_means(rows)] for (title, kind), rows in by_kind.items()]


def fact_of(folder: Path, group: Group, fact: str) -> float | None:
    """Mean of a value over layers, experts and seeds of a group whose file is not a suite's."""
    rows = [row for name in REGIMES for row in read_lines(folder / f"{name}-gram.jsonl") if row["model"] == group.model]
    values = [row[fact] for row in rows if fact in row and row["settings"] == group.scores[0].settings]
    return mean(values) if values else None
