"""The tables of docs/evidence.md from `results/evidence/*.jsonl`.

All numbers are percentage points of test accuracy. Intervals are over seeds and tasks, see `intervals`; differences are
taken per seed and task first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from actmat_experiments.harness.results import REFERENCES
from benchmarks.evidence import choice as auto
from benchmarks.evidence import cosines
from benchmarks.evidence.group import (
    CONTROLS,
    FOLDER,
    LARGER,
    MORE,
    NAMES,
    REGIMES,
    SUITES,
    Group,
    groups,
    made_by,
)
from benchmarks.evidence.intervals import LEAST_TASKS, Points, interval, paired
from benchmarks.evidence.sets import LEFT_OUT_HEAD, expert_sets, left_out_rows
from benchmarks.evidence.subsets import SUBSET_HEAD, subset_rows
from benchmarks.pages import table


def value(points: Points) -> str:
    """Mean and interval; empty without points."""
    return interval(points).text() if points else ""


def difference(one: Points, other: Points) -> str:
    """Paired, see `intervals.paired`."""
    found = paired(one, other)
    return "" if found is None else found.text(sign=True)


def reference_rows(some: Sequence[Group]) -> list[list[str]]:
    """Base and experts of every group."""
    found = []
    for group in some:
        base, experts = group.points("base"), group.points("experts")
        tested = {s.total for s in group.scores}
        title = f"{group.suite}, {group.title}" if group.model else group.title
        found.append(
            [
                *(title, str(len(group.tasks)), ", ".join(map(str, group.seeds))),
                *("-".join(str(n) for n in sorted({min(tested), max(tested)})), value(base)),
                *(value(experts), difference(experts, base)),
            ]
        )
    return found


SHAPE_ROWS = ("ct_merging", "dc_merge@pico", "dc_merge", "cart", "tsv", "actmat")
"""Rows of adapters of other ranks."""
CELLS = {"16, A shared": "hot, shared", "0.0001, A shared": "mild, shared", "shared": "shared"}
CELLS |= {"small": "small", "alpha": "`alpha` 32", "1024 ": "long", "0.0001": "mild", "256 ": "gentle", "": "hot"}
FRESH_ROWS = ("dc_merge", "ct_merging", "tsv", "actmat_ridge", "actmat", "cart", "dc_merge@pico", "tsv@pico")
"""Rows of sets that were merged after a table of `auto` was fixed."""


def row_heads(rows: Sequence[str]) -> list[str]:
    """Heads of `shape_rows`."""
    return ["experts", "seeds", "base", "average", *(f"`{row}`" for row in rows)]


def shape_rows(some: Sequence[Group], rows: Sequence[str]) -> list[list[str]]:
    """Base and average of every group, and points above the average of some rows."""
    found = []
    for group in some:
        average = group.points("average")
        gaps = [difference(points, average) if (points := group.points(row)) else "" for row in rows]
        references = (value(group.points("base")), value(average))
        found.append([group.title, ", ".join(map(str, group.seeds)), *references, *gaps])
    return found


def regime_rows(some: Sequence[Group], folder: Path) -> list[list[str]]:
    """Measures, references and points above the average, a column per group; rows of all but one, the best first."""
    found = []
    for name, fact, factor in (
        ("size of the deltas, %", "change", 100),
        ("overlap of the `A`", "overlap", 1),
        ("cosine of `D^T D` with the Gram matrix", "estimate", 1),
        ("of the identity", "identity", 1),
    ):
        known = [cosines.fact_of(folder, group, fact) for group in some]
        found.append([name, *("" if one is None else f"{factor * one:.2f}" for one in known)])
    for row in ("base", "experts", "average"):
        found.append([row, *(f"{interval(group.points(row)).mean:.1f}" for group in some)])
    rows = list(dict.fromkeys(row for group in some for row in group.rows()))
    gaps = {row: [paired(group.points(row), group.points("average")) for group in some] for row in rows}
    rows = [row for row in rows if row != "average" and gaps[row].count(None) < 2]
    rows.sort(key=lambda row: -mean(gap.mean for gap in gaps[row] if gap is not None))
    return found + [[f"`{row}`", *("" if gap is None else f"{gap.mean:+.1f}" for gap in gaps[row])] for row in rows]


def _cell(group: Group) -> str:
    cell = next(cell for part, cell in CELLS.items() if part in group.title)
    return f"{group.model.partition(',')[0]}, {cell}" if group.suite == "text-mpnet" else cell


def _regimes(folder: Path, kind: str) -> tuple[list[str], Callable[[], list[list[str]]]]:
    some = [group for group in groups(folder, REGIMES) if group.suite.startswith(kind)]
    return ["", *(f"{_cell(g)}, {len(g.seeds)}" for g in some)], lambda: regime_rows(some, folder)


def method_rows(group: Group) -> list[list[str]]:
    """All merges of a group, the best at its default scale first."""
    average, tuned_average = group.points("average"), group.points("average", "tuned")
    found = []
    for name in group.rows():
        own, tuned, divergence = group.points(name), group.points(name, "tuned"), group.divergence(name)
        found.append(
            [
                *(f"`{name}`", ", ".join(map(str, own)), value(own)),
                difference(own, average) if name != "average" else "",
                "" if divergence is None else f"{divergence:.3f}",
                *(value(tuned), group.scales(name)),
                difference(tuned, tuned_average) if name != "average" else "",
            ]
        )
    return found


def task_rows(group: Group) -> list[list[str]]:
    """Points per task, mean over seeds: references, then merges at the default scale."""
    names = [n for n in REFERENCES if group.points(n)]
    found = []
    for name in (*names, *group.rows()):
        points = group.points(name)
        found.append([f"`{name}`", *(f"{mean(p[task] for p in points.values()):.0f}" for task in group.tasks)])
    return found


def claim_rows(some: Sequence[Group]) -> list[list[str]]:
    """`actmat` less the average, TSV and the sum, by group; with the number of tasks, and of trainings that it has."""
    others = ("average", "tsv", "task_arithmetic_1")
    lines = []
    for group in some:
        gaps = [difference(group.points("actmat"), group.points(other)) or "not run" for other in others]
        lines.append([group.title, f"{len(group.tasks)}, {len(group.points('actmat'))}", *gaps])
    return lines


def larger_rows(folder: Path) -> tuple[list[str], Callable[[], list[list[str]]]]:
    """Accuracy of every row of the larger base, a column per training and wording, by the first column."""
    some = groups(folder, LARGER)
    heads = [re.sub(r".*, loss on ", "", group.model) for group in some]

    def rows() -> list[list[str]]:
        names = sorted(
            dict.fromkeys(s.method for group in some for s in group.scores),
            key=lambda name: -interval(some[0].points(name)).mean,
        )
        return [[f"`{n}`", *(" / ".join(_means(group, n)) for group in some)] for n in names]

    return ["row", *heads], rows


def _means(group: Group, row: str) -> list[str]:
    return [f"{mean(points.values()):.1f}" for points in group.points(row).values()]


CT_ROWS = ("ct_merging", "dc_merge", "dc_merge@pico")
CT_HEAD = ["experts", "size", "overlap of the `A`", "seeds", "average", *(f"`{row}`" for row in CT_ROWS)]


def ct_rows(folder: Path) -> list[list[str]]:
    """Points above the average of every set of adapters that CT-Merging was run on, in its seeds, by size."""
    found = []
    for one in sorted(expert_sets(folder), key=lambda one: one.size or 0.0):
        own, average = one.group.points("ct_merging"), one.group.points("average")
        if one.group.regime == "lora" and own:
            gaps = [difference({s: p for s, p in one.group.points(r).items() if s in own}, average) for r in CT_ROWS]
            size = "" if one.size is None else f"{100 * one.size:.2f} %"
            overlap = "" if one.overlap is None else f"{one.overlap:.2f}"
            seeds = ", ".join(map(str, own))
            found.append([one.title, size, overlap, seeds, f"{auto.mean_of(average, own):.1f}", *gaps])
    return found


def evidence_table(name: str, folder: Path = FOLDER) -> str:
    """One of the tables, in Markdown.

    Names: `references`, `claims`, `ct`, `rule`, `held`, `borders`, `out`, `rows`, `gram`, `subsets`,
    `shapes`, `candidates`, `texts`, `images`; `methods` or `tasks`, followed by `_SUITE_REGIME` of "vision",
    "text", "llm" or "tasks", "full" or "lora". With `fresh_`, `ranks_`, `regimes_` or `controls_` before it, a
    table is of those files.
    """
    suites = MORE.get(name.partition("_")[0], SUITES)
    some = groups(folder, suites)
    plain: dict[str, tuple[list[str], Callable[[], list[list[str]]]]] = {
        "references": (
            ["experts", "tasks", "seeds", "tested per task", "base", "experts' own", "head-room"],
            lambda: reference_rows(some),
        ),
        "shapes": (row_heads(SHAPE_ROWS), lambda: shape_rows(some, SHAPE_ROWS)),
        "candidates": (row_heads(FRESH_ROWS), lambda: shape_rows(some, FRESH_ROWS)),
        "texts": _regimes(folder, "text"),
        "images": _regimes(folder, "vision"),
        "claims": (
            ["experts", "tasks, trainings", "`actmat` - average", "- TSV", "- sum"],
            lambda: claim_rows([*some, *groups(folder, (*REGIMES, *CONTROLS, *LARGER))]),
        ),
        "rule": (auto.RULE_HEAD, auto.rule_rows),
        "held": (auto.HELD_HEAD, lambda: auto.held_rows(folder)),
        "borders": (auto.BORDER_HEAD, lambda: auto.border_rows(folder)),
        "out": (LEFT_OUT_HEAD, left_out_rows),
        "rows": larger_rows(folder),
        "gram": (cosines.HEAD, lambda: cosines.kind_rows(folder)),
        "ct": (CT_HEAD, lambda: ct_rows(folder)),
        "subsets": (SUBSET_HEAD, lambda: subset_rows(folder)),
    }
    if (of_all := re.sub(f"^({'|'.join(MORE)})_", "", name)) in plain:
        head, rows = plain[of_all]
        return table(head, found) if (found := rows()) else "*Not run yet.*\n"
    what, suite, regime = name.split("_")
    chosen = [g for g in groups(folder, (NAMES[suite],)) if g.regime == regime]
    return "\n".join(filter(None, (_group_table(what, group) for group in chosen))) or "*Not run yet.*\n"


def _group_table(what: str, group: Group) -> str:
    if what == "tasks":
        text = table(["row", *group.tasks], task_rows(group))
    else:
        head = ["row", "seeds", "default scale", "- average", "divergence", "tuned scale", "scale", "- tuned average"]
        text = table(head, method_rows(group))
        if len(group.tasks) < LEAST_TASKS:
            text += f"\nNo intervals: {len(group.tasks)} tasks are too few to estimate a spread over tasks.\n"
    source = f"`evidence/results/evidence/{group.suite}.jsonl`"
    return f"{text}\n{group.title}; seed {made_by(group.scores)}. Source: {source}.\n"
