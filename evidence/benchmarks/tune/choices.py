"""The choice by divergence among the merges of docs/evidence.md: every method at every scale that was tested, by seed.

The divergence is of 24 inputs per task, which no statistics were measured on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.evidence.group import Candidate, Group, groups
from benchmarks.evidence.tables import rank

HEADER = [
    *("experts", "seed", "candidates", "rank correlation", "chosen", "regret", "- average", "- `actmat`"),
    *("- chosen by labels", "with `regmean`", "regret", "- average"),
]
ALLOWED = 0.5
"""Points: the goal."""


@dataclass(frozen=True)
class Choice:
    """What the least divergence chose in one group and seed, among methods without data.

    Args:
        with_data: the choice when methods that need statistics are candidates too; None where none was run.
    """

    name: str
    seed: int
    known: Sequence[Candidate]
    chosen: Candidate
    labeled: Candidate
    with_data: Candidate | None
    best_with_data: float

    @property
    def regret(self) -> float:
        """To the best on test."""
        return max(c.test for c in self.known) - self.chosen.test

    @property
    def lost_with_data(self) -> float:
        """The same of the choice with data."""
        assert self.with_data is not None
        return self.best_with_data - self.with_data.test

    def over(self, method: str, chosen: Candidate | None = None) -> float:
        """To a method at scale 1, of the choice or of another."""
        other = next(c.test for c in self.known if (c.name, c.scale) == (method, 1.0))
        return (chosen or self.chosen).test - other


def least(some: Sequence[Candidate]) -> Candidate:
    """The candidate of the least divergence."""
    return min(some, key=lambda c: c.divergence)


def choices(some: Sequence[Group] | None = None) -> list[Choice]:
    """One for each group and seed of the evidence with the average, `actmat` and a third method."""
    found = []
    for group in some or groups():
        for seed in group.seeds:
            known, more = group.candidates(seed), group.candidates(seed, measured=True)
            if not {"average", "actmat"} < {c.name for c in known}:
                continue
            labeled = max(known, key=lambda c: (c.validation, -abs(c.scale - 1)))
            name = f"{group.name}, {'full' if group.regime == 'full' else 'LoRA'}"
            with_data = least(more) if len(more) > len(known) else None
            found.append(Choice(name, seed, known, least(known), labeled, with_data, max(c.test for c in more)))
    return found


def evidence_rows(some: Sequence[Group] | None = None) -> list[list[str]]:
    """Per group and seed: the choice, and what it was worth."""
    return [
        [
            *(c.name, str(c.seed), str(len(c.known)), f"{rank(c.known):.2f}", c.chosen.text, f"{c.regret:.1f}"),
            *(f"{c.over('average'):+.1f}", f"{c.over('actmat'):+.1f}", f"{c.chosen.test - c.labeled.test:+.1f}"),
            *_with_data(c),
        ]
        for c in choices(some)
    ]


def _with_data(c: Choice) -> list[str]:
    if c.with_data is None:
        return ["", "", ""]
    return [c.with_data.text, f"{c.lost_with_data:.1f}", f"{c.over('average', c.with_data):+.1f}"]


def evidence_goal(some: Sequence[Group] | None = None) -> str:
    """The goal, and where it fails, in words: without methods that need statistics, and with them."""
    found = choices(some)
    free = [(c, c.chosen, c.regret) for c in found]
    more = [(c, c.with_data, c.lost_with_data) for c in found if c.with_data is not None]
    return _told("Without `regmean`", free) + (_told("With `regmean`", more) if more else "")


def _told(title: str, some: Sequence[tuple[Choice, Candidate, float]]) -> str:
    names = dict.fromkeys(c.name for c, _, _ in some)
    parts = ", ".join(f"{name} {mean(r for c, _, r in some if c.name == name):.1f}" for name in names)
    total = mean(regret for _, _, regret in some)
    gains = [(c, c.over("average", picked)) for c, picked, _ in some]
    below = [f"{c.name}, seed {c.seed} ({gain:+.1f})" for c, gain in gains if gain < -ALLOWED]
    never = f"**missed** in {len(below)} of {len(some)}: {'; '.join(below)}" if below else f"met in all {len(some)}"
    over = mean(c.over("actmat", picked) for c, picked, _ in some)
    gain, least_gain = mean(g for _, g in gains), min(g for _, g in gains)
    met = "met" if total <= ALLOWED else "**missed**"
    return (
        f"* {title}, mean regret at most {ALLOWED} points: {met}, {total:.1f} ({parts}).\n"
        f"* {title}, never more than {ALLOWED} points below the average: {never}; {least_gain:+.1f} at worst.\n"
        f"* {title}, on average {gain:+.1f} points to the average at scale 1, {over:+.1f} to `actmat`.\n"
    )
