"""The tables of docs/evidence.md from `results/evidence/*.jsonl`.

All numbers are percentage points of test accuracy. Intervals are over seeds and tasks, see `intervals`; differences are
taken per seed and task first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from docs.markdown import table
from scipy.stats import spearmanr

from actmat_experiments.harness.results import REFERENCES
from benchmarks.evidence import choice as auto
from benchmarks.evidence import claims, cosines
from benchmarks.evidence.group import FOLDER, FRESH, NAMES, RANKS, SUITES, Candidate, Group, groups, made_by, method_of
from benchmarks.evidence.intervals import LEAST_TASKS, Interval, Points, interval, paired
from benchmarks.evidence.subsets import SUBSET_HEAD, subset_rows


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


SHAPE_ROWS = ("dc_merge@pico", "dc_merge", "cart", "tsv", "actmat")
"""Rows of adapters of other ranks."""


def shape_rows(some: Sequence[Group]) -> list[list[str]]:
    """The average of every group, and points above it of some rows."""
    found = []
    for group in some:
        average = group.points("average")
        gaps = [difference(points, average) if (points := group.points(row)) else "" for row in SHAPE_ROWS]
        found.append([group.title, ", ".join(map(str, group.seeds)), value(average), *gaps])
    return found


LEAST_HALF = 0.05
"""Half an interval in points below which all seeds agree by chance, which says nothing about their spread."""


def significant_rows(some: Sequence[Group]) -> list[list[str]]:
    """Methods with all seeds of a group by the 95 % interval of their difference to the average, best first.

    The interval is over seeds and tasks; of fewer than `auto.FEWEST_TASKS` tasks, over seeds for these tasks.
    """
    found = []
    for group in some:
        average = group.points("average")
        sides: dict[int, list[str]] = {1: [], 0: [], -1: []}
        for name in group.rows():
            own = group.points(name)
            if name == "average" or list(own) != group.seeds:
                continue
            gap = paired(own, average) if len(group.tasks) >= auto.FEWEST_TASKS else _over_seeds(own, average)
            assert gap is not None, "all seeds are there"
            if gap.half is None:
                continue
            differs = abs(gap.mean) > gap.half >= LEAST_HALF
            side = 0 if not differs else 1 if gap.mean > 0 else -1
            sides[side].append(f"`{name}` {gap.mean:+.1f}" if side else f"`{name}`")
        means = [f"{interval(group.points(name)).mean:.1f}" for name in ("base", "average", "experts")]
        found.append([group.title, *means, *map(", ".join, sides.values())])
    return found


def _over_seeds(own: Points, average: Points) -> Interval:
    """Of the difference of the means over these tasks."""
    return interval({s: {"all": mean(own[s].values()) - mean(average[s].values())} for s in own if s in average})


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


def seed_rows(group: Group) -> list[list[str]]:
    """Every merge less the average, by seed, with an interval over seeds, for these tasks and questions."""
    average = group.points("average")
    found = []
    for name in group.rows():
        own = group.points(name)
        gaps = {s: mean(own[s][k] - average[s][k] for k in group.tasks) for s in own if s in average}
        if name != "average" and len(gaps) > 1:
            alone = _over_seeds(own, average)
            found.append([f"`{name}`", *(f"{gaps[s]:+.1f}" if s in gaps else "" for s in group.seeds)])
            found[-1].append(alone.text(sign=True))
    return found


def variant_rows(group: Group) -> list[list[str]]:
    """Variants of methods, by method; each less the method itself, at the default scale of both and tuned."""
    found = []
    for name in sorted(group.rows(varied=True), key=method_of):
        own, method = group.points(name), method_of(name)
        gaps = (difference(group.points(name, kind), group.points(method, kind)) for kind in ("default", "tuned"))
        found.append([f"`{name}`", ", ".join(map(str, own)), value(own), *gaps])
    return found


def task_rows(group: Group) -> list[list[str]]:
    """Points per task, mean over seeds: references, then merges at the default scale."""
    names = [n for n in REFERENCES if group.points(n)]
    found = []
    for name in (*names, *group.rows()):
        points = group.points(name)
        found.append([f"`{name}`", *(f"{mean(p[task] for p in points.values()):.0f}" for task in group.tasks)])
    return found


PAIRS = (
    *(("actmat", "average"), ("actmat", "tsv"), ("tsv", "average"), ("regmean", "average"), ("actmat", "regmean")),
    *(("actmat_ridge", "actmat"), ("aswudi", "actmat"), ("swudi", "actmat"), ("wudi", "actmat")),
)
"""Comparisons: the first less the second."""


CALIBRATED = ("average", "task_arithmetic", "actmat", "tsv", "dc_merge", "cart")
"""Methods that were merged of calibrated deltas (Pico)."""


def calibrated_rows(some: Sequence[Group]) -> list[list[str]]:
    """Points above the average in the same seeds, of methods with and without calibration; a column per group."""
    found = []
    for method in CALIBRATED:
        for name in (method, f"{method}@pico"):
            cells = [difference(g.points(name), g.points("average")) if name != "average" else "" for g in some]
            if any(g.points(name) for g in some) and name != "average":
                found.append([f"`{name}`", *cells])
    return found


def with_calibrated(some: Sequence[Group]) -> list[Group]:
    """Groups of adapters in which such rows were measured."""
    return [g for g in some if g.regime == "lora" and g.points("actmat@pico")]


def pair_rows(some: Sequence[Group]) -> list[list[str]]:
    """A row per comparison and kind of scale, a column per group."""
    return [
        [
            f"`{one}` - `{other}`",
            kind,
            *(difference(g.points(one, kind), g.points(other, kind)) for g in some if g.rows()),
        ]
        for one, other in PAIRS
        for kind in ("default", "tuned")
    ]


def rank(some: Sequence[Candidate]) -> float:
    """Spearman's correlation of small divergence with test accuracy."""
    return -float(spearmanr([c.divergence for c in some], [c.test for c in some])[0])


def choice_rows(some: Sequence[Group]) -> list[list[str]]:
    """Per group and seed: what divergence and labels choose among all methods and scales, and what that costs."""
    found = []
    for group in some:
        for seed in group.seeds:
            known = group.candidates(seed)
            if len(known) < 3:
                continue
            best = max(known, key=lambda c: c.test)
            least = min(known, key=lambda c: c.divergence)
            labeled = max(known, key=lambda c: (c.validation, -abs(c.scale - 1)))
            found.append(
                [
                    *(f"{group.suite}, {group.title}", str(seed), str(len(known)), f"{rank(known):.2f}"),
                    *(least.text, f"{best.test - least.test:.1f}"),
                    *(labeled.text, f"{best.test - labeled.test:.1f}", best.text),
                ]
            )
    return found


def evidence_table(name: str, folder: Path = FOLDER) -> str:
    """One of the tables, in Markdown.

    Names: `references`, `significant`, `pairs`, `auto`, `choice`, `gram`, `sweep`, `subsets`, `calibrated`,
    `shapes`, `bests`; `methods`, `seeds`, `variants`, `tasks` or `claims`, followed by `_SUITE_REGIME` of "vision",
    "text", "llm" or "tasks", "full" or "lora". With `fresh_` or `ranks_` before it, a table is of runs
    that choose nothing.
    """
    suites = {"fresh": FRESH, "ranks": RANKS}.get(name.partition("_")[0], SUITES)
    some = groups(folder, suites)
    plain: dict[str, tuple[list[str], Callable[[], list[list[str]]]]] = {
        "references": (
            ["experts", "tasks", "seeds", "tested per task", "base", "experts' own", "head-room"],
            lambda: reference_rows(some),
        ),
        "significant": (
            ["experts", "base", "average", "experts' own", "significantly above the average", "neither", "below"],
            lambda: significant_rows(some),
        ),
        "pairs": (["difference", "scale", *(g.title for g in some if g.rows())], lambda: pair_rows(some)),
        "calibrated": (
            ["row", *(f"{g.title}, {len(g.points('actmat@pico'))} seeds" for g in with_calibrated(some))],
            lambda: calibrated_rows(with_calibrated(some)),
        ),
        "choice": (
            [
                *("experts", "seed", "candidates", "rank correlation", "least divergence", "regret"),
                *("best on 24 labels a task", "regret", "best on test"),
            ],
            lambda: choice_rows(some),
        ),
        "shapes": (["experts", "seeds", "average", *(f"`{row}`" for row in SHAPE_ROWS)], lambda: shape_rows(some)),
        "auto": (auto.HEAD, lambda: auto.choice_table(folder, suites)),
        "bests": (auto.BEST_HEAD, lambda: auto.best_table(folder)),
        "gram": (cosines.HEAD, lambda: cosines.kind_rows(folder)),
        "sweep": (cosines.SWEEP_HEAD, lambda: cosines.sweep_rows(folder)),
        "subsets": (SUBSET_HEAD, lambda: subset_rows(folder)),
    }
    if (of_all := name.removeprefix("fresh_").removeprefix("ranks_")) in plain:
        head, rows = plain[of_all]
        return table(head, found) if (found := rows()) else "*Not run yet.*\n"
    what, suite, regime = name.split("_")
    chosen = [g for g in groups(folder, (NAMES[suite],)) if g.regime == regime]
    return "\n".join(filter(None, (_group_table(what, group) for group in chosen))) or "*Not run yet.*\n"


def _group_table(what: str, group: Group) -> str:
    if what == "tasks":
        text = table(["row", *group.tasks], task_rows(group))
    elif what == "seeds":
        text = table(
            ["- average", *(f"seed {s}" for s in group.seeds), "for these tasks and questions"], seed_rows(group)
        )
    elif what == "claims":
        text = table(claims.HEAD, claims.claim_rows(group))
    elif what == "variants":
        if not (rows := variant_rows(group)):
            return ""
        text = table(["row", "seeds", "default scale", "- the method", "tuned: - the method"], rows)
    else:
        head = ["row", "seeds", "default scale", "- average", "divergence", "tuned scale", "scale", "- tuned average"]
        text = table(head, method_rows(group))
        if len(group.tasks) < LEAST_TASKS:
            text += f"\nNo intervals: {len(group.tasks)} tasks are too few to estimate a spread over tasks.\n"
    source = f"`benchmarks/results/evidence/{group.suite}.jsonl`"
    return f"{text}\n{group.title}; seed {made_by(group.scores)}. Source: {source}.\n"
