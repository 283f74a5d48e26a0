"""Variants of the interference family on many subsets: chosen on one half of the tasks, reported on the other.

A split cuts the tasks into two halves. The variant with the best mean *validation* score over the subsets of the first
half is chosen; what is reported is the *test* score over the subsets of the second half, as paired differences to the
references on the same subsets. Every split is used both ways. No task is ever in both halves, so that what is reported
was not chosen on. Scores are accuracies divided by the expert's, averaged over the tasks of the subset.

Below the cache: `study/<suite>.json` with seeds, halves, comparisons by regime and all points, `study/<suite>.md` with
the comparisons as tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.merging import Candidate
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.table import Z_95, markdown


def _variant(name: str, scale: float = 1.0, fields: Mapping[str, Any] | None = None, **options: Any) -> Candidate:
    return Candidate(name, "actmat", options, scale, fields or {})


_CAPPED = {"postprocess": {"norm_cap": "mean"}}
_BOUNDED = {"postprocess": {"norm_cap": "average"}}

VARIANTS: tuple[Candidate, ...] = (
    _variant("actmat"),
    *(_variant(f"rtol={r:g}", rtol=r) for r in (1e-3, 1e-2)),
    *(_variant(f"ridge={r:g}", filter="tikhonov", ridge=r) for r in (0.1, 0.3, 1.0)),
    _variant("exponential,time=10", filter="exponential", time=10.0),
    _variant("adaptive", filter="adaptive"),
    *(_variant(f"ridge={r:g},null=mean", filter="tikhonov", ridge=r, null="mean") for r in (0.1, 1.0, 10.0)),
    _variant("normalise=norm", normalise="norm"),
    _variant("trim=0.2", trim=0.2),
    _variant("power=0.5", power=0.5),
    _variant("ridge=0.1,power=0.5", filter="tikhonov", ridge=0.1, power=0.5),
    _variant("scale=0.5", scale=0.5),
    _variant("ridge=0.1,scale=0.5", scale=0.5, filter="tikhonov", ridge=0.1),
    _variant("ridge=0.1,norm_cap=mean", fields=_CAPPED, filter="tikhonov", ridge=0.1),
    _variant("norm_cap=average", fields=_BOUNDED),
    _variant("ridge=0.1,norm_cap=average", fields=_BOUNDED, filter="tikhonov", ridge=0.1),
    _variant("ridge=1,null=mean,norm_cap=average", fields=_BOUNDED, filter="tikhonov", ridge=1.0, null="mean"),
)
"""Variants of the interference family: cut-offs, ridges, filters, what fills the null space, normaliser, trimming,
power, scale, cap. With `null="mean"` a growing ridge leads from the paper's rule to the average."""

NEIGHBOURS: tuple[Candidate, ...] = (
    Candidate("average", "average"),
    Candidate("tsv", "tsv"),
    Candidate("iso_c", "iso_c"),
    Candidate("regmean", "regmean"),
)
"""References that variants are compared with; never chosen. RegMean sees data."""

REFERENCES = ("actmat", "average")
"""Rows that all others are compared with."""


@dataclass(frozen=True, slots=True)
class Point:
    """One variant on one subset of the experts.

    Args:
        validation, test: mean over the tasks of accuracy / expert's accuracy.
    """

    regime: str
    seed: int
    tasks: tuple[str, ...]
    variant: str
    validation: float
    test: float


@dataclass(frozen=True, slots=True)
class Half:
    """Tasks to choose on and tasks to report on."""

    choose: tuple[str, ...]
    report: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """To a reference, on the same subsets.

    Args:
        low, high: 95 % interval; subsets that share tasks are not independent, so the halves, not the subsets, are
            counted as draws.
    """

    mean: float
    low: float
    high: float
    better: float
    worse: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One variant over all halves.

    Args:
        variant: its name; "chosen" is, per half, the one that was best on the other half.
        against: reference -> paired difference to it.
        picks: for "chosen": the variants chosen, and how often.
    """

    variant: str
    score: float
    against: Mapping[str, Difference]
    n: int
    picks: Mapping[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def halves(tasks: Sequence[str], splits: int, seed: int = 0) -> list[Half]:
    """`splits` random cuts into two halves, each used both ways.

    Raises:
        ValueError: fewer than four tasks: a half would hold no subset.
    """
    if len(tasks) < 4:
        raise ValueError(f"a study takes at least four tasks, two to merge in each half; there are {len(tasks)}")
    found = []
    for split in range(splits):
        order = torch.randperm(len(tasks), generator=generator_for(seed, f"halves {split}")).tolist()
        first = tuple(tasks[i] for i in sorted(order[: len(tasks) // 2]))
        second = tuple(tasks[i] for i in sorted(order[len(tasks) // 2 :]))
        found += [Half(first, second), Half(second, first)]
    return found


def subsets_within(cuts: Sequence[Half]) -> list[tuple[str, ...]]:
    """All pairs that lie in a half, and all halves, each once."""
    sides = dict.fromkeys(side for cut in cuts for side in (cut.choose, cut.report))
    return list(dict.fromkeys(s for side in sides for n in (2, len(side)) if n > 1 for s in combinations(side, n)))


def compare_variants(
    points: Sequence[Point],
    cuts: Sequence[Half],
    *,
    choose_among: Sequence[str] | None = None,
    references: Sequence[str] = REFERENCES,
) -> list[Comparison]:
    """All variants on the halves that are reported, and the variant chosen on the others; the best first.

    Args:
        points: of one regime; all seeds.
        choose_among: names that may be chosen; default: all.
        references: names of the variants to compare with.
    """
    by_place: dict[tuple[int, tuple[str, ...]], dict[str, Point]] = {}
    for point in points:
        by_place.setdefault((point.seed, point.tasks), {})[point.variant] = point
    variants = list(dict.fromkeys(p.variant for p in points))
    picks: dict[str, int] = {}
    rows: dict[str, list[list[dict[str, float]]]] = {name: [] for name in ["chosen", *variants]}
    for cut in cuts:
        chosen_on = list(_within(by_place, cut.choose))
        best = max(choose_among or variants, key=lambda v: sum(place[v].validation for place in chosen_on))
        picks[best] = picks.get(best, 0) + 1
        reported = list(_within(by_place, cut.report))
        for name, by_cut in rows.items():
            own = best if name == "chosen" else name
            by_cut.append([{"": place[own].test} | {r: place[r].test for r in references} for place in reported])
    found = [_compared(name, by_cut, references, picks if name == "chosen" else None) for name, by_cut in rows.items()]
    return sorted(found, key=lambda c: (c.variant != "chosen", -c.score))


def _within(
    places: Mapping[tuple[int, tuple[str, ...]], dict[str, Point]], side: Sequence[str]
) -> Iterator[dict[str, Point]]:
    return (row for (_, tasks), row in places.items() if set(tasks) <= set(side))


def _compared(
    name: str,
    by_cut: Sequence[Sequence[Mapping[str, float]]],
    references: Sequence[str],
    picks: Mapping[str, int] | None,
) -> Comparison:
    every = [place[""] for cut in by_cut for place in cut]
    against = {r: _difference([[place[""] - place[r] for place in cut] for cut in by_cut]) for r in references}
    return Comparison(name, sum(every) / len(every), against, len(every), picks)


def _difference(by_cut: Sequence[Sequence[float]]) -> Difference:
    every = [d for cut in by_cut for d in cut]
    means = [sum(cut) / len(cut) for cut in by_cut]
    mean = sum(means) / len(means)
    spread = math.sqrt(sum((m - mean) ** 2 for m in means) / max(1, len(means) - 1) / len(means))
    return Difference(
        mean=mean,
        low=mean - Z_95 * spread,
        high=mean + Z_95 * spread,
        better=sum(d > 0 for d in every) / len(every),
        worse=sum(d < 0 for d in every) / len(every),
    )


def markdown_study(found: Sequence[Comparison]) -> str:
    """The comparisons as a table; scores in percent of the experts'."""
    references = list(found[0].against) if found else []
    head = ["variant", "% of expert", *(t for r in references for t in (f"against `{r}`", "95 %", "better / worse on"))]
    rows = [
        [
            f"`{c.variant}`" if c.picks is None else f"chosen ({', '.join(f'{n}: {k}' for n, k in c.picks.items())})",
            f"{100 * c.score:.1f}",
            *(cell for r in references for cell in _cells(c.against[r], c.n)),
        ]
        for c in found
    ]
    return markdown(head, rows)


def _cells(difference: Difference, n: int) -> tuple[str, str, str]:
    return (
        f"{100 * difference.mean:+.1f}",
        f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}",
        f"{100 * difference.better:.0f} / {100 * difference.worse:.0f} % of {n}",
    )


Answers = Mapping[str, Mapping[str, Sequence[float]]]
"""Part ("validation", "test") -> task -> right and all answers."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Experts of one regime and seed, ready to be merged in subsets.

    Args:
        tasks: names, in the order of the merge.
        own: what every expert answers of its own task.
        merged: subset of the tasks -> variant -> what its merge answers of these tasks, at the variant's own scale.
    """

    regime: Regime
    seed: int
    tasks: tuple[str, ...]
    own: Answers
    merged: Callable[[tuple[str, ...]], Mapping[str, Answers]]

    def points(self, cuts: Sequence[Half]) -> list[Point]:
        """All variants on every subset within a half."""
        return [
            Point(self.regime, self.seed, subset, variant, *self._of_experts(answers))
            for subset in subsets_within(cuts)
            for variant, answers in self.merged(subset).items()
        ]

    def _of_experts(self, answers: Answers) -> tuple[float, float]:
        """Validation and test: mean over tasks of the share divided by the expert's share."""

        def mean(part: str) -> float:
            own, found = self.own[part], answers[part]
            return sum((found[t][0] / found[t][1]) / (own[t][0] / own[t][1]) for t in found) / len(found)

        return mean("validation"), mean("test")


def read_study(suite: str, cache: Path) -> dict[str, Any]:
    """The results of `run_study` below the cache, as plain data."""
    found: dict[str, Any] = json.loads((cache / "study" / f"{suite}.json").read_text(encoding="utf-8"))
    return found


def run_study(suite: str, cache: Path, subjects: Iterable[Subject], splits: int, family: Sequence[str]) -> str:
    """Points of all subjects, compared per regime, written below the cache.

    Args:
        subjects: all of the same tasks; each is made when its turn comes.
        family: names of the variants that may be chosen; the others are what they are held against.

    Returns:
        The tables, in Markdown.
    """
    points: list[Point] = []
    cuts: list[Half] = []
    seeds: list[int] = []
    for subject in subjects:
        cuts = halves(subject.tasks, splits)
        points += subject.points(cuts)
        seeds += [] if subject.seed in seeds else [subject.seed]
    regimes = list(dict.fromkeys(p.regime for p in points))
    found = {r: compare_variants([p for p in points if p.regime == r], cuts, choose_among=family) for r in regimes}
    text = "".join(f"**{regime}**\n\n{markdown_study(rows)}\n" for regime, rows in found.items())
    folder = cache / "study"
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "seeds": seeds,
        "halves": [asdict(cut) for cut in cuts],
        "comparisons": {regime: [c.to_json() for c in rows] for regime, rows in found.items()},
        "points": [asdict(p) for p in points],
    }
    (folder / f"{suite}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / f"{suite}.md").write_text(text, encoding="utf-8")
    return text
