"""The tables of docs/data-free.md from `results/datafree.jsonl`.

Differences are percentage points of test accuracy, per task of a subject, to the average of the same experts: the mean
over all tasks of all subjects with half of Student's interval at 95 % over them; `at worst` is the lowest mean of a
subject over its tasks.
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

__all__ = ["FILE", "TABLES", "datafree_table", "read_rows", "verdict"]

FILE = RESULTS / "datafree.jsonl"
SUITES = {"digits": "digits", "vision-vits14": "ViT-S/14", "reasoning-small": "puzzles, by RL"}
CHOSEN_ON = ("digits", 0)
"""Suite and seed on which rules, shares and lengths were looked at before they were fixed; all others confirm."""
GAIN_LORA, GAIN_FULL, LOSS = 1.0, 2.0, 0.5
"""Points: the bars, set before anything was measured."""
SEES_DATA = "inputs"
"""Estimates that are measured on data, for comparison."""

Row = Mapping[str, Any]
Merge = Mapping[str, Any]
Pick = Callable[[Row], Merge]


def read_rows(path: Path = FILE) -> list[Row]:
    """Subjects, in the order of the file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def found(row: Row, rule: str, length: str = "one") -> Merge:
    """One merge of a subject."""
    return next(m for m in row["rows"] if m["rule"] == rule and m["length"] == length)


def least_noise(rule: str) -> Pick:
    """The length of a rule at which the merge diverges least from the experts on noise, of all that were tried."""
    return lambda row: min((m for m in row["rows"] if m["rule"] == rule), key=lambda m: float(m["noise"]))


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
    """Rules that every one of the subjects has, in the order of measurement."""
    every = [dict.fromkeys(m["rule"] for m in row["rows"] if m["length"] == "one") for row in rows]
    return [rule for rule in every[0] if all(rule in some for some in every)] if every else []


def subject_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Subjects, and how much there is to gain."""
    out = []
    for name, some in groups(rows).items():

        def points(value: Callable[[Row], Mapping[str, float]], some: Sequence[Row] = some) -> str:
            return f"{mean(100 * mean(value(r).values()) for r in some):.1f}"

        cells_ = [points(lambda r: r["base"]), points(lambda r: average(r)["test"]), points(lambda r: r["own"])]
        seeds = ", ".join(str(r["seed"]) for r in some)
        out.append([name, seeds, str(len(some[0]["tasks"])), *cells_])
    return out


def alignment_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Estimate -> mean cosine with the measured Gram matrix, by kind of experts."""
    by_group = groups(rows)
    names = dict.fromkeys(n for row in rows for n in row["alignment"] if n != SEES_DATA)
    return [
        [name, *(_mean_cosine(some, name) for some in by_group.values())]
        for name in sorted(names, key=lambda n: n != "identity")
    ]


def _mean_cosine(rows: Sequence[Row], name: str) -> str:
    values = [row["alignment"][name] for row in rows if name in row["alignment"]]
    return f"{mean(values):.2f}" if values else ""


def rule_rows(rows: Sequence[Row], lora: bool) -> list[list[str]]:
    """Rules at length one, on the seed that chose and on those that confirm; the best on all first."""
    some = [row for row in rows if is_lora(row) == lora]
    parts = (
        [row for row in some if chosen_on(row)],
        [row for row in some if row["suite"] == "digits" and not chosen_on(row)],
        [row for row in some if row["suite"] != "digits"],
    )
    out = []
    for rule in rules_of(some):

        def pick(row: Row, rule: str = rule) -> Merge:
            return found(row, rule)

        if rule != "average":
            out.append(
                (
                    mean(mean(differences(row, pick, average)) for row in some),
                    [_named(rule), *(c for part in parts for c in cells(part, pick))],
                )
            )
    return [line for _, line in sorted(out, key=lambda pair: -pair[0])]


def _named(rule: str) -> str:
    return f"*{rule}* (sees data)" if rule.startswith(SEES_DATA) else f"`{rule}`"


def lengths_of(rows: Sequence[Row], rule: str) -> list[str]:
    """Lengths by which a rule was tried."""
    return list(dict.fromkeys(m["length"] for m in rows[0]["rows"] if m["rule"] == rule and m["length"] != "fixed"))


def length_picks(rows: Sequence[Row], rule: str) -> dict[str, Pick]:
    """Name of a length -> the merge of a subject."""
    picks: dict[str, Pick] = {name: (lambda r, n=name: found(r, rule, n)) for name in lengths_of(rows, rule)}
    return picks | {"least divergence on noise": least_noise(rule), "*best on test*": best(rule)}


def lengthened(rows: Sequence[Row]) -> list[str]:
    """Rules whose length was varied."""
    return list(dict.fromkeys(m["rule"] for m in rows[0]["rows"] if m["length"] != "one")) if rows else []


def length_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Rule and length -> difference to the average, of the digits and the images, full and LoRA."""
    kinds = [
        [r for r in rows if is_lora(r) == lora and (r["suite"] == "digits") == digits]
        for digits in (True, False)
        for lora in (False, True)
    ]
    out = []
    for rule in lengthened(rows):
        for length, pick in length_picks(rows, rule).items():
            out.append([f"`{rule}`", length, *(c for some in kinds for c in cells(some, pick))])
    out.append(["any", "least divergence on noise", *(c for some in kinds for c in cells(some, least_of_all))])
    return out


def verdict(rows: Sequence[Row]) -> str:
    """Which rules and lengths pass the bars on the seeds that confirm, in words."""
    rest = [row for row in rows if not chosen_on(row)]
    lora, full = [r for r in rest if is_lora(r)], [r for r in rest if not is_lora(r)]
    if not lora or not full:
        return "*Not measured yet.*\n"
    lines = []
    for kind, some, passes in (("LoRA", lora, _passes_lora), ("full fine-tuning", full, _passes_full)):
        picks: dict[str, Pick] = {
            f"`{rule}`": (lambda r, n=rule: found(r, n)) for rule in rules_of(some) if not rule.startswith(SEES_DATA)
        }
        for rule in lengthened(some):
            picks |= {f"`{rule}` x {n}": p for n, p in length_picks(some, rule).items() if not n.startswith("*")}
        picks["any rule x least divergence on noise"] = least_of_all
        passed = [name for name, pick in picks.items() if passes(some, pick)]
        said = f"{', '.join(passed)} pass" if passed else "none passes"
        where = f"on the {len(some)} subjects that confirm"
        lines.append(f"* {kind}: of {len(picks)} rules and lengths without data, {said} {where}.")
    return "\n".join(lines) + "\n"


def _passes_lora(rows: Sequence[Row], pick: Pick) -> bool:
    centre, _, worst = pooled(rows, pick)
    return centre >= GAIN_LORA and worst >= -LOSS


def _passes_full(rows: Sequence[Row], pick: Pick) -> bool:
    def better(row: Row) -> Merge:
        return max((found(row, n) for n in ("average", "tsv")), key=lambda m: mean(m["test"].values()))

    gain = pooled(rows, pick, lambda r: found(r, "actmat"))[0]
    return gain >= GAIN_FULL and pooled(rows, pick, better)[2] >= -LOSS


_KINDS = ("digits, full", "digits, LoRA", "ViT-S/14, full", "ViT-S/14, LoRA")
_CHOSEN = ["digits, seed 0", "at worst", "digits, other seeds", "at worst", "ViT-S/14", "at worst"]
TABLES: dict[str, tuple[Callable[[Sequence[Row]], list[str]], Callable[[Sequence[Row]], list[list[str]]]]] = {
    "subjects": (lambda rows: ["experts", "seeds", "tasks", "base", "average", "experts' own"], subject_rows),
    "alignment": (lambda rows: ["estimate", *groups(rows)], alignment_rows),
    "lora": (lambda rows: ["rule", *_CHOSEN], lambda rows: rule_rows(rows, True)),
    "full": (lambda rows: ["rule", *_CHOSEN], lambda rows: rule_rows(rows, False)),
    "lengths": (
        lambda rows: ["rule", "length", *(c for name in _KINDS for c in (name, "at worst"))],
        length_rows,
    ),
}


def filled(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The columns that are not empty in all rows.

    >>> filled(["a", "b"], [["x", ""], ["y", ""]])
    (['a'], [['x'], ['y']])
    """
    kept = [n for n in range(len(header)) if any(row[n] for row in rows)]
    return [header[n] for n in kept], [[row[n] for n in kept] for row in rows]


def datafree_table(name: str, table: Callable[[list[str], list[list[str]]], str]) -> str:
    """One of `TABLES`, or the `verdict`, in Markdown."""
    rows = read_rows()
    if name == "verdict" or not rows:
        return verdict(rows)
    header, made = TABLES[name]
    machines = sorted({f"{r['machine']}, {r['date']}" for r in rows})
    return table(*filled(header(rows), made(rows))) + f"\n`python -m benchmarks.datafree`, {'; '.join(machines)}.\n"
