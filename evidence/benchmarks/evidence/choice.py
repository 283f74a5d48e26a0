"""Choose the table of `method: auto` from the committed scores, and test it by leaving one base out.

    python -m benchmarks.evidence.choice

Sets are those of `sets.expert_sets`. Candidates of a row of the table are those of `CANDIDATES` that were measured in
every set of the row, at their defaults. The row takes the one with the largest mean gain over the average that is in
no set and seed more than a point below the average or the base; where none holds that, the one whose worst set is
best. The mean is over bases, of each over its sets and the seeds that all candidates have. The method in force stays
where another is less than `LEVEL` points better. Adapters have rows by the size of their deltas relative to the base's
weights. Both borders are fitted, too, and whether adapters above the first that share the start of `A`, or change
different modules, are with the largest, for which nothing is safe. For every base, all this is fitted without its
sets, which show what that table gives. Which rows were measured in them decides nothing: where one was chosen that
they lack, the table is not tested there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path
from statistics import fmean as mean
from typing import NamedTuple

from actmat.run.automatic import GENTLE, HOT, ON_ADAPTERS, TABLE, AutoChoice, ModelForm, ModelKind
from benchmarks.evidence.group import FOLDER, Group
from benchmarks.evidence.intervals import Interval, Points, paired
from benchmarks.evidence.sets import FEATURES, ExpertSet, expert_sets
from benchmarks.evidence.small import FOLDER as SMALL_FOLDER
from benchmarks.evidence.small import SMALL
from benchmarks.pages import table

CANDIDATES = (
    *("average", "task_arithmetic", "task_arithmetic_1", "ties", "sce", "breadcrumbs", "della", "cart", "model_stock"),
    *("karcher", "knots", "tsv", "iso_c", "iso_cts", "dc_merge", "ct_merging"),
    *("actmat", "actmat_ridge", "wudi", "swudi", "aswudi"),
)
"""Rows that may be chosen: methods without data and without chance. Another one joins before it is run, not after."""
TOLERATED = -1.0
"""Points below the average or the base that a method may be in a set."""
TIE = 0.1
"""Points of mean gain within which borders are not told from each other."""
LEVEL = 0.5
"""Points of mean gain that another method must be better by to replace the one in force."""
WANTED: tuple[tuple[ModelForm, ModelKind], ...] = (
    *(("full", "encoder"), ("full", "decoder"), ("full", "any")),
    *(("gentle", "any"), ("adapters", "any"), ("mixed", "any")),
)


class Cuts(NamedTuple):
    """Borders between adapters.

    Args:
        low, high: sizes of deltas from which they are no longer gentle, and from which they count among the others.
        apart: features of adapters that count among the others, too, from `low` on; see `ExpertSet.features`.
    """

    low: float
    high: float
    apart: frozenset[str] = frozenset()


APARTS = (frozenset({"start"}), frozenset[str](), frozenset(FEATURES), frozenset({"modules"}))
"""What may count among the others; of those that gain the same, the first is taken."""
IN_FORCE = Cuts(GENTLE, HOT, frozenset(FEATURES))


def form_of(one: ExpertSet, cuts: Cuts) -> ModelForm:
    """Full, or adapters by the size of their deltas and their starts."""
    if one.group.regime == "full":
        return "full"
    if one.size is None:
        return "unknown"
    if one.size < cuts.low:
        return "gentle"
    return "other" if one.size >= cuts.high or cuts.apart & one.features else "adapters"


def units(some: Sequence[ExpertSet]) -> list[list[ExpertSet]]:
    """Sets in which a candidate must be measured; the seeds of a small base are in two files, which make one."""
    parts: dict[object, list[ExpertSet]] = {}
    for number, one in enumerate(some):
        is_small = one.group.suite in SMALL
        parts.setdefault((one.base, one.group.title) if is_small else number, []).append(one)
    return list(parts.values())


def candidates(some: Sequence[ExpertSet]) -> list[str]:
    """Rows that were measured in all of these sets."""
    rows = [{row for one in unit for row in one.measured} for unit in units(some)]
    return sorted(set.intersection(set(CANDIDATES), *rows))


def chosen(some: Sequence[ExpertSet], rows: Sequence[str], in_force: str = "") -> str:
    """The row that the criterion takes of these sets, in the seeds that all rows have; without one, the average."""
    above: dict[str, dict[str, list[float]]] = {row: {} for row in rows}
    worst = dict.fromkeys(rows, 99.0)
    for one in some:
        means, references = [one.means.get(row, {}) for row in rows], (one.means["average"], one.means["base"])
        for seed in references[0].keys() & set.intersection(*(set(own) for own in means)):
            average, base = (own[seed] for own in references)
            for row, own in zip(rows, means, strict=True):
                above[row].setdefault(one.base, []).append(own[seed] - average)
                worst[row] = min(worst[row], own[seed] - max(average, base))
    if not any(above.values()):
        return "average"
    gain = {row: mean(mean(gains) for gains in above[row].values()) for row in rows}
    safe = [row for row in rows if worst[row] >= TOLERATED]
    best = max(safe, key=gain.__getitem__) if safe else max(rows, key=worst.__getitem__)
    return in_force if in_force in safe and gain[best] - gain[in_force] < LEVEL else best


Fitted = Mapping[tuple[ModelForm, ModelKind], str]
"""Row of the table -> row of the evidence."""


def fitted(every: Sequence[ExpertSet], cuts: Cuts, without: str = "") -> Fitted:
    """The table of all sets but those of a base; a row is left out that then has no set."""
    rows = {}
    for form, kind in WANTED:
        if used := [s for s in every if s.base != without and _belongs(s, form, kind, cuts)]:
            now = "" if without or (form, kind) not in TABLE else TABLE[form, kind].method
            rows[form, kind] = chosen(used, candidates(used), now)
    return rows


def _belongs(one: ExpertSet, form: ModelForm, kind: ModelKind, cuts: Cuts) -> bool:
    if form == "unknown":
        return one.group.regime == "lora" and "start" not in one.features
    return form in ("mixed", form_of(one, cuts)) and kind in ("any", one.kind)


def cuts_of(every: Sequence[ExpertSet], without: str = "", count: int = 2) -> Cuts:
    """Borders between measured sizes, and the split by starts, of the largest mean gain; all of them if several tie.

    Args:
        count: of the borders; fewer than two are equal, or 0.
    """
    return ranked_cuts(every, without, count)[0][1]


def ranked_cuts(every: Sequence[ExpertSet], without: str = "", count: int = 2) -> list[tuple[float, Cuts]]:
    """Mean gain over the bases of adapters and borders, the best first."""
    some = [s for s in every if s.group.regime == "lora" and s.size is not None and s.base != without]
    bases = dict.fromkeys(s.base for s in some)
    sizes = sorted({s.size for s in some if s.size is not None})
    middles = [(a * b) ** 0.5 for a, b in pairwise(sizes)]
    equal = [(c, c) for c in middles]
    pairs = {0: [(0.0, 0.0)], 1: equal, 2: [*combinations(middles, 2)] or equal}[count]

    @cache
    def gains(used: tuple[ExpertSet, ...], form: ModelForm) -> Mapping[str, list[float]]:
        by_base = dict[str, list[float]]()
        now = "" if without or (form, "any") not in TABLE else TABLE[form, "any"].method
        row = "average" if form == "other" else chosen(used, candidates(used), now) if used else ""
        for one in used:
            by_base.setdefault(one.base, []).extend(one.gains(row))
        return by_base

    def gain(cuts: Cuts) -> float:
        forms: dict[ModelForm, list[ExpertSet]] = {"gentle": [], "adapters": [], "other": []}
        for one in some:
            forms[form_of(one, cuts)].append(one)
        parts = [gains(tuple(own), form) for form, own in forms.items()]
        return mean(mean(g for part in parts for g in part.get(base, [])) for base in bases)

    if not bases:
        return [(0.0, Cuts(0.0, 0.0))]
    every_cut = [Cuts(*pair, apart) for pair, apart in product(pairs or [(0.0, 0.0)], APARTS)]
    return sorted(((gain(cuts), cuts) for cuts in every_cut), key=lambda pair: -pair[0])


@dataclass(frozen=True)
class HeldOut:
    """A set, and the row that a table takes for it that was fitted without its base."""

    one: ExpertSet
    form: ModelForm
    row: str


@cache
def tables(folder: Path = FOLDER, small: Path = SMALL_FOLDER, count: int = 2) -> Mapping[str, tuple[Cuts, Fitted]]:
    """Base -> borders and table that are fitted without it."""
    every = expert_sets(folder, small)
    cuts = {base: cuts_of(every, base, count) for base in dict.fromkeys(s.base for s in every)}
    return {base: (some, fitted(every, some, base)) for base, some in cuts.items()}


@cache
def held_out(folder: Path = FOLDER, small: Path = SMALL_FOLDER, count: int = 2) -> tuple[HeldOut, ...]:
    """Every set by the table of the other bases, with so many borders."""
    held = []
    for one in expert_sets(folder, small):
        cuts, rows = tables(folder, small, count)[one.base]
        form = form_of(one, cuts)
        row = rows.get((form, one.kind)) or rows.get((form, "any")) or rows["mixed", "any"]
        held.append(HeldOut(one, form, row))
    return tuple(held)


def _held_of(folder: Path, small: Path, form: ModelForm, kind: ModelKind, cuts: Cuts) -> list[HeldOut]:
    """The sets of a row of the table, by the tables of the other bases."""
    return [held for held in held_out(folder, small) if _belongs(held.one, form, kind, cuts)]


def choices(
    folder: Path = FOLDER, small: Path = SMALL_FOLDER
) -> tuple[Cuts, dict[tuple[ModelForm, ModelKind], AutoChoice]]:
    """The borders and the table of `actmat.run.automatic`: fitted on all sets, with what held-out bases gave."""
    every = expert_sets(folder, small)
    best = cuts_of(every)
    cuts = Cuts(round(best.low, 4), round(best.high, 3), best.apart)
    rows = {}
    for (form, kind), row in fitted(every, cuts).items():
        some = by_base(_held_of(folder, small, form, kind, cuts), row if form == "mixed" else "")
        rows[form, kind] = measured(row, [own.gain for own in some.values() if own.gain is not None])
    return cuts, rows


class OnBase(NamedTuple):
    """What the tables without a base give on its sets.

    Args:
        gain: mean points above the average; None if no set was merged by the chosen rows.
        rows: that were chosen.
        half: of the interval, the mean of the sets' ones, since sets of one base share tasks; NaN where a set has none.
        missing: chosen rows that a set lacks.
    """

    gain: float | None
    rows: list[str]
    half: float
    missing: list[str]


def by_base(some: Sequence[HeldOut], fixed: str = "") -> dict[str, OnBase]:
    """Base -> what the rows that the other bases chose, or a fixed one, give on its sets."""
    bases: dict[str, list[HeldOut]] = {}
    for held in some:
        bases.setdefault(held.one.base, []).append(held)
    return {base: _on_base(sets, fixed) for base, sets in bases.items()}


def _on_base(sets: Sequence[HeldOut], fixed: str) -> OnBase:
    gains, halves = list[float](), list[float]()
    rows, missing = dict[str, None](), dict[str, None]()
    for held in sets:
        row = fixed or held.row
        gap = paired(held.one.group.points(row), held.one.group.points("average"))
        (missing if gap is None else rows)[row] = None
        if gap is not None:
            gains += (own := held.one.gains(row))
            halves += [math.nan if gap.half is None else gap.half] * len(own)
    return OnBase(*((mean(gains), list(rows), mean(halves)) if gains else (None, [], math.nan)), list(missing))


def on_adapters(folder: Path = FOLDER, small: Path = SMALL_FOLDER) -> dict[ModelForm, AutoChoice]:
    """`ON_ADAPTERS` of `actmat.run.automatic`."""
    forms: dict[ModelForm, dict[str, list[float]]] = {form: {} for form in ON_ADAPTERS}
    for one in expert_sets(folder, small):
        for form in (f for f in forms if _belongs(one, f, "any", IN_FORCE)):
            forms[form].setdefault(one.base, []).extend(one.gains("actmat"))
    return {form: measured("actmat", [mean(gains) for gains in some.values()]) for form, some in forms.items()}


def measured(method: str, some: Sequence[float]) -> AutoChoice:
    """The record of a method by its mean gain on every base."""
    return AutoChoice(method, len(some), round(mean(some), 1), round(min(some), 1))


RULE_HEAD = [
    "you have",
    "deltas",
    "`auto` takes",
    "points above the average, held out",
    "on each base, by another method if named",
]
WORDS: Mapping[ModelForm, tuple[str, str]] = {
    "full": ("fine-tuned models", ""),
    "gentle": ("LoRA adapters", f"below about {100 * GENTLE:.1g} % of the base's weights"),
    "adapters": ("LoRA adapters of the same modules, different `A`", f"about {100 * GENTLE:.1g} to {100 * HOT:.1g} %"),
    "mixed": ("all else: adapters that are larger, of different modules, from one `A`, without a base; models", ""),
}


def rule_rows() -> list[list[str]]:
    """The table of `auto`, as the code has it."""
    lines = []
    for (form, kind), row in TABLE.items():
        what, deltas = WORDS[form]
        of = f", {kind}s" if kind != "any" else ", other kinds" if form == "full" else ""
        some = {} if row.method == "average" else by_base(_held_of(FOLDER, SMALL_FOLDER, form, kind, IN_FORCE))
        each = "; ".join(_words(base, own, row.method) for base, own in some.items())
        lines.append([what + of, deltas, f"`{row.method}`", f"{row.gain:+.1f}" if some else "", each])
    return lines


def _words(base: str, own: OnBase, method: str) -> str:
    """The gain on a base, the rows that gave it, and those that would have to be run to know it."""
    if own.gain is None:
        return f"{base} not tested: its sets lack {_listed(own.missing)}"
    gain = Interval(own.gain, None if math.isnan(own.half) else own.half, 0).text(sign=True)
    by = f" by {_listed(own.rows)}" * (own.rows != [method])
    return f"{base} {gain}{by}" + f" (some sets lack {_listed(own.missing)})" * bool(own.missing)


def _listed(rows: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in rows)


HELD_HEAD = [
    *("experts", "size", "trainings", "`auto` without this base", "base", "average", "`auto`", "above the average"),
    *("best without data", "with inputs", "experts' own"),
]
WITH_INPUTS = ("regmean:data=training", "regmean")
"""Rows with inputs in their order: `merge --data` by eight prompts where it was run, else all statistics."""


def held_rows(folder: Path = FOLDER, small: Path = SMALL_FOLDER) -> list[list[str]]:
    """Every set by the table of the other bases, in the seeds that its row has."""
    lines = []
    for held in held_out(folder, small):
        group, average = held.one.group, held.one.group.points("average")
        points, without = group.points(held.row), [r for r in held.one.rows() if r in CANDIDATES]
        gap = paired(points, average)
        seeds = average if gap is None else {seed: points[seed] for seed in points if seed in average}
        best, inputs = _best(group, without, seeds), _best(group, WITH_INPUTS, seeds)
        base, plain, experts = (f"{mean_of(group.points(row), seeds):.1f}" for row in ("base", "average", "experts"))
        size = "" if held.one.size is None else f"{100 * held.one.size:.2f} %"
        auto, above = ("not tested", "") if gap is None else (f"{mean_of(points, seeds):.1f}", gap.text(sign=True))
        start = [held.one.title, size, str(len(seeds)), f"`{held.row}`", base, plain, auto, above]
        lines.append([*start, best, inputs, experts])
    return lines


def _best(group: Group, rows: Sequence[str], seeds: Points) -> str:
    """The best of the rows that have all these seeds; empty without one."""
    means = {r: mean_of(group.points(r), seeds) for r in rows if group.points(r).keys() >= seeds.keys()}
    return f"`{max(means, key=means.__getitem__)}` {max(means.values()):.1f}" if means else ""


BORDER_HEAD = ["left out", "below, %", "from, %", "apart", "gentle", "between", "points"]


def border_rows(folder: Path = FOLDER) -> list[list[str]]:
    """Borders that change no row and lose less than a tenth of a point: of all sets, and of all but one where others.

    Points are the mean gain over the bases of adapters.
    """
    every = [one for one in expert_sets(folder) if one.group.regime == "lora"]
    first = _borders(every)
    lines = [["nothing", *first]]
    for one in every:
        if (line := _borders([s for s in every if s is not one]))[:-1] != first[:-1]:
            lines.append([one.title, *line])
    return lines


def _borders(every: Sequence[ExpertSet]) -> list[str]:
    ranked = ranked_cuts(every)
    gain, best = ranked[0]
    rows = _pair(every, best)
    same = [c for g, c in ranked if g > gain - TIE and c.apart == best.apart and _pair(every, c) == rows]
    tied = [c.apart for g, c in ranked if g > gain - TIE]
    certain, possible = frozenset.intersection(*tied), frozenset.union(*tied)
    apart = ", ".join(f if f in certain else f"({f})" for f in FEATURES if f in possible)
    sizes = [one.size for one in every if one.size is not None]
    low, high = (_range([c[k] for c in same], sizes) for k in (0, 1))
    return [low, high, apart, *rows, f"{gain:+.1f}"]


def _range(cuts: Sequence[float], sizes: Sequence[float]) -> str:
    """The measured sizes next to these borders, between which any other does the same."""
    low = max((size for size in sizes if size < min(cuts)), default=0.0)
    high = min((size for size in sizes if size >= max(cuts)), default=math.inf)
    return f"{100 * low:.2g} to {100 * high:.2g}"


def _pair(every: Sequence[ExpertSet], cuts: Cuts) -> list[str]:
    """Rows of gentle adapters, and of those between the borders."""
    rows = fitted(every, cuts)
    return [f"`{rows.get((form, 'any'), 'average')}`" for form in ("gentle", "adapters")]


def mean_of(points: Points, seeds: Points) -> float:
    """Mean over tasks and some seeds."""
    return mean(value for seed in seeds for value in points[seed].values())


def measured_table(name: str) -> str:
    """Points of a method above the average, untuned, by form and kind of model; for the page of the method."""
    cells = {}
    for words, is_full in (("full fine-tuning", True), ("LoRA", False)):
        for kind in ("encoder", "decoder"):
            sets = [s for s in expert_sets() if s.kind == kind and (s.group.regime == "full") == is_full]
            some = [gain for s in sets for gain in s.gains(name)]
            said = f"{mean(some):+.1f} ({min(some):+.1f} to {max(some):+.1f}; {len(some)})" if some else "not measured"
            cells[f"{kind}s, {words}"] = said
    head = "Points above the average, untuned: mean (worst to best set; sets), see [evidence](../evidence.md)."
    return f"{head}\n\n{table(list(cells), [list(cells.values())])}"


def main() -> None:
    """Print borders and table, to be put into `actmat.run.automatic`, and every set by the table of other bases."""
    (gentle, hot, _), table = choices()
    print(f"GENTLE, HOT = {gentle}, {hot}")
    for key, choice in (*table.items(), *on_adapters().items()):
        print(f"    {key!r}: {choice!r},".replace("'", '"'))
    for row in (*border_rows(), *held_rows()):
        print("; ".join(row))


if __name__ == "__main__":
    main()
