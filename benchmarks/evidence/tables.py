"""The tables of docs/evidence.md from `results/evidence/*.jsonl`.

All numbers are percentage points of test accuracy. What was drawn are tasks: a task's value is its mean over seeds, and
an interval is Student's t at 95 % over the tasks' values, with one degree of freedom less than tasks; differences are
taken per task first. With one seed it says nothing of another training run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from scipy.stats import spearmanr, t

from actmat_experiments.harness.results import REFERENCES, Score, read_scores
from benchmarks.common import RESULTS

__all__ = ["FOLDER", "SUITES", "Group", "evidence_table", "groups", "over_tasks"]

FOLDER = RESULTS / "evidence"
SUITES = ("vision-vits14", "text-minilm")
NAMES = {"vision": "vision-vits14", "text": "text-minilm"}
"""Names of suites in the marks of pages."""

Table = Callable[[list[str], list[list[str]]], str]
Values = Mapping[str, float]
"""Task -> points, mean over seeds."""


class Group:
    """Scores of one suite, model and regime, of the settings that were run last."""

    def __init__(self, scores: Sequence[Score]) -> None:
        last = scores[-1].settings
        self.scores = [s for s in scores if s.settings == last]
        self.suite, self.model, self.regime = scores[0].suite, scores[0].model, scores[0].regime
        self.seeds = sorted({s.seed for s in self.scores})
        self.tasks = list(dict.fromkeys(s.task for s in self.scores))

    def values(self, method: str, kind: str = "default") -> Values:
        """Of a row; empty unless it has all tasks and seeds."""
        found = {(s.task, s.seed): 100 * s.share for s in self.scores if (s.method, s.scale) == (method, kind)}
        if len(found) != len(self.tasks) * len(self.seeds):
            return {}
        return {task: mean(found[task, seed] for seed in self.seeds) for task in self.tasks}

    def rows(self) -> list[str]:
        """Rows that are merges and complete at the default scale, the best first."""
        names = dict.fromkeys(s.method for s in self.scores if s.method not in REFERENCES)
        found = {name: mean(self.values(name).values()) for name in names if self.values(name)}
        return sorted(found, key=lambda name: -found[name])

    def scales(self, method: str) -> str:
        """The scales that validation chose, by seed."""
        chosen = {s.seed: s.detail["scale"] for s in self.scores if (s.method, s.scale) == (method, "tuned")}
        return ", ".join(f"{chosen[seed]:g}" for seed in sorted(chosen))

    def divergence(self, method: str) -> float | None:
        """Mean over tasks and seeds of the divergence from the experts on validation inputs, at the default scale."""
        found = [
            s.detail["validation"]["divergence"]
            for s in self.scores
            if (s.method, s.scale) == (method, "default") and "validation" in s.detail
        ]
        return mean(found) if len(found) == len(self.tasks) * len(self.seeds) else None


def groups(folder: Path = FOLDER) -> list[Group]:
    """All suites, models and regimes that have results."""
    found: dict[tuple[str, str, str], list[Score]] = {}
    for suite in SUITES:
        for score in read_scores(folder / f"{suite}.jsonl"):
            found.setdefault((score.suite, score.model, score.regime), []).append(score)
    return [Group(some) for some in found.values()]


def over_tasks(values: Sequence[float], sign: bool = False) -> str:
    """Mean and half the width of the 95 % interval of Student's t.

    >>> over_tasks([1.0, 2.0, 3.0], sign=True)
    '+2.0 ±2.5'
    """
    text = f"{mean(values):+.1f}" if sign else f"{mean(values):.1f}"
    if len(values) < 2:
        return text
    return f"{text} ±{t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values)):.1f}"


def difference(one: Values, other: Values) -> str:
    """Paired by task."""
    return over_tasks([one[task] - other[task] for task in one], sign=True) if one and other else ""


def reference_rows(some: Sequence[Group]) -> list[list[str]]:
    """Base and experts of every group."""
    found = []
    for group in some:
        base, experts = group.values("base"), group.values("experts")
        tested = {s.total for s in group.scores}
        found.append(
            [
                *(f"{group.suite}, {_title(group)}", str(len(group.tasks)), ", ".join(map(str, group.seeds))),
                *("-".join(str(n) for n in sorted({min(tested), max(tested)})), over_tasks([*base.values()])),
                *(over_tasks([*experts.values()]), difference(experts, base)),
            ]
        )
    return found


SUMMARY = ("average", "task_arithmetic", "actmat", "actmat_bounded", "tsv", "regmean")
"""Rows of the short table."""


def summary_rows(some: Sequence[Group]) -> list[list[str]]:
    """Means at the default scale, and what `actmat` is above the average."""
    found = []
    for group in some:
        values = [group.values(name) for name in ("base", *SUMMARY, "experts")]
        cells = [f"{mean(v.values()):.1f}" if v else "" for v in values]
        best = difference(group.values("actmat"), group.values("average"))
        found.append([f"{_title(group)}, {len(group.tasks)} tasks", *cells, best])
    return found


def method_rows(group: Group) -> list[list[str]]:
    """All merges of a group, the best at its default scale first."""
    average, tuned_average = group.values("average"), group.values("average", "tuned")
    found = []
    for name in group.rows():
        own, tuned, divergence = group.values(name), group.values(name, "tuned"), group.divergence(name)
        found.append(
            [
                *(f"`{name}`", over_tasks([*own.values()]), difference(own, average) if name != "average" else ""),
                "" if divergence is None else f"{divergence:.3f}",
                over_tasks([*tuned.values()]) if tuned else "",
                group.scales(name),
                difference(tuned, tuned_average) if name != "average" else "",
            ]
        )
    return found


def task_rows(group: Group) -> list[list[str]]:
    """Points per task: references, then merges at the default scale."""
    names = [n for n in REFERENCES if group.values(n)]
    return [[f"`{n}`", *(f"{v:.0f}" for v in group.values(n).values())] for n in (*names, *group.rows())]


def divergence_rows(some: Sequence[Group]) -> list[list[str]]:
    """How well the divergence on unlabelled inputs ranks and chooses merges."""
    found = []
    for group in some:
        known = {n: d for n in group.rows() if (d := group.divergence(n)) is not None}
        if len(known) < 3:
            continue
        tested = {n: mean(group.values(n).values()) for n in known}
        least, best = min(known, key=lambda n: known[n]), max(tested, key=lambda n: tested[n])
        rank = -float(spearmanr([known[n] for n in known], [tested[n] for n in known])[0])
        found.append(
            [
                *(f"{group.suite}, {_title(group)}", str(len(known)), f"{rank:.2f}"),
                *(f"`{least}` {tested[least]:.1f}", f"`{best}` {tested[best]:.1f}"),
                difference(group.values(least), group.values("average")),
            ]
        )
    return found


def gram_table_rows(folder: Path) -> list[list[str]]:
    """Mean cosines by suite, regime and kind of layer; how many of the experts' layers the estimate knows better."""
    by_kind: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for suite in SUITES:
        path = folder / f"{suite}-gram.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            row = json.loads(line)
            kind = ".".join(p for p in row["tensor"].split(".") if not p.isdigit() and p != "weight")
            title = f"{row['suite']}, {row['model']}, {row['regime']}"
            by_kind.setdefault((title, kind.removeprefix("encoder.layer.")), []).append(row)
    return [
        [
            *(title, f"`{kind}`", str(len(rows)), f"{mean(r['estimate'] for r in rows):.2f}"),
            f"{mean(r['identity'] for r in rows):.2f}",
            f"{100 * mean(r['estimate'] > r['identity'] for r in rows):.0f} %",
            f"{100 * mean(r['change'] for r in rows):.2f} %",
        ]
        for (title, kind), rows in by_kind.items()
    ]


def evidence_table(name: str, table: Table, folder: Path = FOLDER) -> str:
    """One of the tables, in Markdown: `references`, `summary`, `divergence`, `gram`, or `methods_SUITE_REGIME`,
    `tasks_SUITE_REGIME` of "vision" or "text", "full" or "lora".
    """
    some = groups(folder)
    if name == "references":
        head = ["experts", "tasks", "seeds", "tested per task", "base", "experts' own", "head-room"]
        return table(head, reference_rows(some))
    if name == "summary":
        head = ["experts", "base", *(f"`{n}`" for n in SUMMARY), "experts' own", "`actmat` - average"]
        return table(head, summary_rows(some))
    if name == "divergence":
        head = ["experts", "merges", "rank correlation", "least divergence", "best on test", "chosen - average"]
        return table(head, divergence_rows(some))
    if name == "gram":
        head = ["experts", "layer", "n", "`D^T D`", "identity", "`D^T D` nearer", "change of weights"]
        return table(head, gram_table_rows(folder))
    what, suite, regime = name.split("_")
    chosen = [g for g in some if (g.suite, g.regime) == (NAMES[suite], regime)]
    return "\n".join(_group_table(what, group, table) for group in chosen) or "*Not run yet.*\n"


def _group_table(what: str, group: Group, table: Table) -> str:
    if what == "tasks":
        text = table(["row", *group.tasks], task_rows(group))
    else:
        head = ["row", "default scale", "- average", "divergence", "tuned scale", "scale", "- tuned average"]
        text = table(head, method_rows(group))
    versions = next((s.detail["versions"] for s in group.scores if "versions" in s.detail), {})
    how = ", ".join(f"{n} {v}" for n, v in sorted(versions.items()))
    seeds = ", ".join(map(str, group.seeds))
    return f"{text}\n{_title(group)}; seed {seeds}; {how}. Source: `benchmarks/results/evidence/{group.suite}.jsonl`.\n"


def _title(group: Group) -> str:
    return f"{group.model}, {'full fine-tuning' if group.regime == 'full' else 'LoRA'}"
