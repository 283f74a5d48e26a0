"""Tables of docs/tune-results.md on the choice on pretrained bases, from `results/pretrained.jsonl`.

Points are percentage points of test accuracy. A choice is by the least mean divergence from the experts, on:

* `measured`: the inputs that statistics were measured on, too, as many as the other kinds
* `halves`: the second half of these, statistics being measured on the first half
* `held`: as many other inputs of the tasks
* `other`, `noise`: inputs of another expert's task, inputs of no task
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from scipy.stats import spearmanr

from benchmarks.common import RESULTS
from benchmarks.evidence.group import groups as groups_of_evidence
from benchmarks.evidence.intervals import Points, paired
from benchmarks.pretrained.choices import HEADER, evidence_lines, evidence_rows

FILE = RESULTS / "pretrained.jsonl"
ADAMERGING = RESULTS / "pretrained-adamerging.jsonl"
NAMES = {"vision-vits14": "ViT-S/14", "text-minilm": "MiniLM-L6"}
REGMEAN, BY_HALF = "inputs, regmean", "inputs, regmean by half"
KEYS = {"halves": "second half measured"}

Row = Mapping[str, Any]
Merge = Mapping[str, Any]
Table = Callable[[list[str], list[list[str]]], str]


def read_rows(path: Path = FILE) -> list[Row]:
    """Subjects on whose inputs merges were tried, in the order of suites, regimes and seeds."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    order, some = list(NAMES), [row for row in map(json.loads, lines) if row["draws"]]
    return sorted(some, key=lambda r: (order.index(r["suite"]), r["regime"], r["seed"]))


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Kind of experts -> subjects, and all together."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{NAMES[row['suite']]}, {'LoRA' if row['regime'] == 'lora' else 'full'}", []).append(row)
    return {**found, "all": list(rows)}


def candidates(row: Row, *, without: Sequence[str] = (BY_HALF,)) -> list[Merge]:
    """Merges among which inputs choose."""
    usual = [m for m in row["rows"] if "held" in m and m["length"] in ("one", "fixed")]
    return [m for m in usual if m["rule"] not in without]


def chosen(row: Row, kind: str = "measured", *, statistics: bool = True) -> Merge:
    """The merge that inputs of a kind choose.

    Args:
        statistics: with methods that need some.
    """
    without = [REGMEAN if kind == "halves" else BY_HALF, *(() if statistics else (REGMEAN, BY_HALF))]
    key = KEYS.get(kind, kind)
    return min(candidates(row, without=without), key=lambda m: float(m[key]))


def by_labels(row: Row) -> Merge:
    """The merge of the best accuracy on the held inputs with labels; of equal ones that of the least divergence."""
    return max(candidates(row), key=lambda m: (m["labels"], -m["held"]))


def value(merge: Merge) -> float:
    """Mean over tasks, in points."""
    return 100 * mean(merge["test"].values())


def plain(row: Row, rule: str) -> Merge:
    """A method at scale 1."""
    return next(m for m in row["rows"] if m["rule"] == rule and m["length"] == "one")


def regret(row: Row, merge: Merge) -> float:
    """Points that it lacks to the best candidate on the test data, which is a maximum over their noise."""
    return max(value(m) for m in candidates(row)) - value(merge)


def fair_regret(row: Row, merge: Merge) -> float:
    """The same to the candidate that is best on one half of the test data, on the other half; mean of both ways."""
    lacks = []
    for side in (True, False):
        best = max(candidates(row), key=lambda m: _half(m, side))
        lacks.append(_half(best, not side) - _half(merge, not side))
    return mean(lacks)


def _half(merge: Merge, even: bool) -> float:
    values = [e if even else 2 * merge["test"][t] - e for t, e in merge["even"].items()]
    return 100 * mean(values)


def points(rows: Sequence[Row], pick: Callable[[Row], Merge]) -> Points:
    """Number of the subject -> task -> points."""
    return {n: {t: 100 * v for t, v in pick(row)["test"].items()} for n, row in enumerate(rows)}


def gain(rows: Sequence[Row], pick: Callable[[Row], Merge], to: Callable[[Row], Merge]) -> str:
    """Mean difference with half of its interval; of several suites their mean only."""
    if len({row["suite"] for row in rows}) > 1:
        return f"{mean(value(pick(r)) - value(to(r)) for r in rows):+.1f}"
    found = paired(points(rows, pick), points(rows, to))
    return found.text(sign=True) if found else ""


def average(row: Row) -> Merge:
    """What a choice must not be below."""
    return plain(row, "average")


def choice_rows(rows: Sequence[Row]) -> list[list[str]]:
    """What was chosen, and what it was worth."""
    out = []
    for name, some in groups(rows).items():
        ranks = [-spearmanr([m["measured"] for m in c], [value(m) for m in c])[0] for c in map(candidates, some)]
        own = f"{mean(100 * mean(r['own'].values()) for r in some):.1f}"
        out.append(
            [
                name,
                ", ".join(str(r["seed"]) for r in some) if name != "all" else str(len(some)),
                own,
                f"{mean(value(chosen(r)) for r in some):.1f}",
                f"{mean(regret(r, chosen(r)) for r in some):.1f}",
                f"{mean(fair_regret(r, chosen(r)) for r in some):.1f}",
                gain(some, chosen, average),
                f"{min(value(chosen(r)) - value(average(r)) for r in some):+.1f}",
                gain(some, chosen, lambda r: plain(r, "actmat")),
                gain(some, chosen, by_labels),
                f"{mean(ranks):.2f} ({min(ranks):.2f})",
            ]
        )
    return out


def subject_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Every subject: the best on test, and what was chosen how."""
    out = []
    for name, some in groups(rows).items():
        for row in some if name != "all" else ():
            best = max(candidates(row), key=value)
            picks = [best, chosen(row), chosen(row, "halves"), chosen(row, "held"), by_labels(row)]
            out.append([f"{name}, seed {row['seed']}", f"{value(average(row)):.1f}", *map(_cell, picks)])
    return out


def _cell(merge: Merge) -> str:
    rule = "regmean" if merge["rule"] in (REGMEAN, BY_HALF) else merge["rule"]
    return f"`{rule}` x {merge['scale']:g}: {value(merge):.1f}"


def statistics_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Regret, and lowest difference to the average, by which inputs measure and which choose."""
    ways: dict[str, Callable[[Row], Merge]] = {
        "without `regmean`": lambda r: chosen(r, statistics=False),
        "the same": chosen,
        "halves": lambda r: chosen(r, "halves"),
        "others": lambda r: chosen(r, "held"),
    }
    out = []
    for name, some in groups(rows).items():
        cells = []
        for pick in ways.values():
            cells.append(f"{mean(regret(r, pick(r)) for r in some):.1f}")
            cells.append(f"{min(value(pick(r)) - value(average(r)) for r in some):+.1f}")
        out.append([name, str(len(some)), *cells])
    return out


def optimism_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Divergence of methods on the inputs that statistics were measured on, and on others."""
    out = []
    for name, some in groups(rows).items():
        cells = []
        for rule in ("average", "tsv", "aswudi", REGMEAN):
            measured, held = (mean(plain(r, rule)[k] for r in some) for k in ("measured", "held"))
            cells += [f"{measured:.3f}", f"{held:.3f}"]
        out.append([name, *cells])
    return out


def number_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Regret by the number of inputs, mean over draws of them; in brackets the lowest difference to the average."""
    numbers = sorted({int(n) for r in rows for n in r["draws"]})
    out = []
    for name, some in groups(rows).items():
        cells = []
        for number in numbers:
            have = [r for r in some if str(number) in r["draws"]]
            picks = [(r, r["rows"][k]) for r in have for k in r["draws"][str(number)]]
            lost = [value(m) - value(average(r)) for r, m in picks]
            cells.append(f"{mean(regret(r, m) for r, m in picks):.1f} ({min(lost):+.1f})" if picks else "")
        out.append([name, str(len(some)), *cells])
    return out


def wrong_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Regret, and lowest difference to the average, with inputs of a wrong kind."""
    out = []
    for name, some in groups(rows).items():
        cells = []
        for kind in ("held", "other", "noise"):
            cells.append(f"{mean(regret(r, chosen(r, kind)) for r in some):.1f}")
            cells.append(f"{min(value(chosen(r, kind)) - value(average(r)) for r in some):+.1f}")
        out.append([name, str(len(some)), *cells])
    return out


def adamerging_rows(rows: Sequence[Row], path: Path = ADAMERGING) -> list[list[str]]:
    """AdaMerging on the inputs that choose, against the choice."""
    found = {r["subject"]: r for r in map(json.loads, path.read_text().splitlines())} if path.is_file() else {}
    out = []
    for row in rows:
        if (trained := found.get(row["subject"])) is None:
            continue
        other = {0: {t: 100 * v for t, v in trained["test"].items()}}
        difference = paired(points([row], chosen), other)
        assert difference is not None
        head = f"{NAMES[row['suite']]}, {'LoRA' if row['regime'] == 'lora' else 'full'}, seed {row['seed']}"
        entropy = f"{trained['entropy'][0]:.2f} to {trained['entropy'][1]:.2f}"
        out.append(
            [
                *(head, str(trained["steps"]), entropy, f"{mean(other[0].values()):.1f}", _cell(chosen(row))),
                difference.text(sign=True),
            ]
        )
    return out


_WRONG = ["experts", "n", "own", "at worst", "another task's", "at worst", "noise", "at worst"]
TABLES: dict[str, tuple[Callable[[Sequence[Row]], list[str]], Callable[[Sequence[Row]], list[list[str]]]]] = {
    "choice": (
        lambda rows: [
            *("experts", "seeds", "experts' own", "chosen", "regret", "fair regret", "- average", "at worst"),
            *("- `actmat`", "- chosen by labels", "rank correlation (least)"),
        ],
        choice_rows,
    ),
    "subjects": (
        lambda rows: ["experts", "average", "best on test", "the same inputs", "halves", "other inputs", "labels"],
        subject_rows,
    ),
    "statistics": (
        lambda rows: [
            *("experts", "n", "without `regmean`", "at worst", "the same", "at worst", "halves", "at worst"),
            *("others", "at worst"),
        ],
        statistics_rows,
    ),
    "optimism": (
        lambda rows: ["experts", *(c for m in ("average", "tsv", "aswudi", "regmean") for c in (f"`{m}`", "others"))],
        optimism_rows,
    ),
    "numbers": (
        lambda rows: ["experts", "n", *map(str, sorted({int(n) for r in rows for n in r["draws"]}))],
        number_rows,
    ),
    "wrong": (lambda rows: _WRONG, wrong_rows),
    "adamerging": (
        lambda rows: ["experts", "steps", "entropy", "AdaMerging", "chosen", "chosen - AdaMerging"],
        adamerging_rows,
    ),
}


def pretrained_table(name: str, table: Table) -> str:
    """One of `TABLES`, or the choice among the merges of the `evidence` and its `goal`, in Markdown."""
    if name == "goal":
        return evidence_lines(groups_of_evidence())
    if name == "evidence":
        return table(HEADER, evidence_rows(groups_of_evidence()))
    header, made = TABLES[name]
    rows = read_rows()
    lines = made(rows) if rows else []
    if not lines:
        return "*Not measured yet.*\n"
    machines = sorted({f"{r['machine']}, {r['date']}" for r in rows})
    return table(header(rows), lines) + f"\n`python -m benchmarks.pretrained`, {'; '.join(machines)}.\n"
