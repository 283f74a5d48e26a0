"""Measured merges of the subjects: picked by rule and length, and compared task by task.

Subjects are lines of `results/datafree.jsonl` (digits) and `results/pretrained.jsonl`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t

from benchmarks.common import RESULTS

FILE = RESULTS / "datafree.jsonl"
PRETRAINED = RESULTS / "pretrained.jsonl"
SUITES = {"digits": "digits", "vision-vits14": "ViT-S/14", "text-minilm": "MiniLM", "reasoning-small": "puzzles, by RL"}
CHOSEN_ON = ("digits", 0)
"""Suite and seed on which rules, shares and lengths were looked at before they were fixed; all others confirm."""
SEES_DATA = "inputs"
"""Estimates that are measured on data, for comparison."""

LENGTHS_CHOSEN = ("least divergence on noise", "*best on test*")
"""Lengths that are chosen among all of a rule's."""

Row = Mapping[str, Any]
Merge = Mapping[str, Any]
Pick = Callable[[Row], Merge]


def read_rows(*paths: Path) -> list[Row]:
    """Subjects, in the order of the files."""
    some = [path for path in paths or (FILE,) if path.is_file()]
    return [json.loads(line) for path in some for line in path.read_text(encoding="utf-8").splitlines()]


def has(row: Row, rule: str, length: str = "one") -> bool:
    """True for a rule that was measured on this subject."""
    return any(m["rule"] == rule and m["length"] == length for m in row["rows"])


def found(row: Row, rule: str, length: str = "one") -> Merge:
    """One merge of a subject."""
    return next(m for m in row["rows"] if m["rule"] == rule and m["length"] == length)


def least_noise(*rules: str) -> Pick:
    """The rule and length at which the merge diverges least from the experts on noise, of all that were tried."""
    return lambda row: min((m for m in row["rows"] if m["rule"] in rules), key=lambda m: float(m["noise"]))


def least_of_all(row: Row) -> Merge:
    """The merge of the least divergence on noise, of all rules and lengths without data."""
    return min((m for m in row["rows"] if not m["rule"].startswith(SEES_DATA)), key=lambda m: float(m["noise"]))


def best(rule: str) -> Pick:
    """The length of a rule that is best on the test data: an upper bound, with a maximum's optimism."""
    return lambda row: max((m for m in row["rows"] if m["rule"] == rule), key=lambda m: mean(m["test"].values()))


def differences(row: Row, pick: Pick, to: Pick) -> list[float]:
    """Points per task."""
    own, other = pick(row)["test"], to(row)["test"]
    return [100 * (own[task] - other[task]) for task in row["tasks"]]


def average(row: Row) -> Merge:
    """What all is compared with."""
    return found(row, "average")


def pooled(rows: Sequence[Row], pick: Pick, to: Pick = average) -> tuple[float, float, float]:
    """Mean over tasks and subjects, half of its interval, and the worst subject's mean."""
    by_subject = [differences(row, pick, to) for row in rows]
    every = [d for some in by_subject for d in some]
    half = t.ppf(0.975, len(every) - 1) * stdev(every) / math.sqrt(len(every)) if len(every) > 1 else math.nan
    return mean(every), float(half), min(mean(some) for some in by_subject)


def cells(rows: Sequence[Row], pick: Pick, to: Pick = average) -> list[str]:
    """Pooled and worst, or empty cells."""
    if not rows:
        return ["", ""]
    centre, half, worst = pooled(rows, pick, to)
    return [f"{centre:+.1f} ±{half:.1f}", f"{worst:+.1f}"]


def chosen_on(row: Row) -> bool:
    """True for a subject that was looked at before the rules were fixed."""
    return (row["suite"], row["seed"]) == CHOSEN_ON


def is_lora(row: Row) -> bool:
    """True for experts that are adapters."""
    return str(row["regime"]).startswith("lora")


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Kind of experts -> subjects."""
    found_: dict[str, list[Row]] = {}
    for row in rows:
        found_.setdefault(f"{SUITES.get(row['suite'], row['suite'])}, {row['regime']}", []).append(row)
    return found_


def rules_of(rows: Sequence[Row]) -> list[str]:
    """Rules of any of the subjects, in the order of measurement."""
    return list(dict.fromkeys(m["rule"] for row in rows for m in row["rows"] if m["length"] == "one"))


def lengths_of(rows: Sequence[Row], rule: str) -> list[str]:
    """Lengths by which a rule was tried on any of the subjects."""
    every = (m["length"] for row in rows for m in row["rows"] if m["rule"] == rule and m["length"] != "fixed")
    return list(dict.fromkeys(every))


def length_picks(rows: Sequence[Row], rule: str) -> dict[str, Pick]:
    """Name of a length -> the merge of a subject."""
    picks: dict[str, Pick] = {name: (lambda r, n=name: found(r, rule, n)) for name in lengths_of(rows, rule)}
    return picks | {"least divergence on noise": least_noise(rule), "*best on test*": best(rule)}


def lengthened(rows: Sequence[Row]) -> list[str]:
    """Rules whose length was varied, by more than fixed scales."""
    return list(dict.fromkeys(m["rule"] for row in rows for m in row["rows"] if m["length"] == "projection"))


def measured_lengths(rows: Sequence[Row], rule: str, length: str) -> bool:
    """True if all subjects have a rule at a length; those that noise or the test data choose need several lengths."""
    if length in LENGTHS_CHOSEN:
        return all(sum(m["rule"] == rule for m in row["rows"]) > 1 for row in rows)
    return all(has(row, rule, length) for row in rows)
