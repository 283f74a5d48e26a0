"""The choice by divergence on really pretrained models, from the rows of docs/evidence.md.

Candidates are the merges of `results/evidence/*.jsonl`: every row at its default scale and at the scale that labelled
validation inputs chose. A candidate's divergence and its accuracy on validation are of the same few inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from scipy.stats import spearmanr

from benchmarks.evidence.tables import Group, difference

__all__ = ["HEADER", "Candidate", "candidates", "pretrained_rows"]

HEADER = [
    *("experts", "inputs per task", "candidates", "rank correlation", "chosen", "regret"),
    *("- average", "- `actmat`", "- chosen by labels"),
]
KINDS = ("default", "tuned")


@dataclass(frozen=True)
class Candidate:
    """A row at one of its two scales.

    Args:
        divergence, right: mean over tasks and seeds, on validation inputs.
    """

    method: str
    kind: str
    scale: float
    test: dict[str, float]
    divergence: float
    right: float

    @property
    def mean_test(self) -> float:
        """Points, mean over tasks."""
        return mean(self.test.values())


def candidates(group: Group) -> list[Candidate]:
    """All rows that have all tasks, with what was seen on validation; those that see more data than others as well."""
    found = []
    for method in group.rows():
        for kind in KINDS:
            test = dict(group.values(method, kind))
            lines = [s for s in group.scores if (s.method, s.scale) == (method, kind) and "validation" in s.detail]
            if not test or len(lines) != len(group.tasks) * len(group.seeds):
                continue
            seen = [s.detail["validation"] for s in lines]
            scale = mean(float(s.detail["scale"]) for s in lines)
            divergence = mean(v["divergence"] for v in seen)
            right = mean(v["correct"] / v["total"] for v in seen)
            found.append(Candidate(method, kind, scale, test, divergence, right))
    return found


def pretrained_rows(groups: Sequence[Group]) -> list[list[str]]:
    """What the divergence chooses in each group, against the best, the average, `actmat` and the choice by labels."""
    out = []
    for group in groups:
        some = candidates(group)
        if len(some) < 3:
            continue
        chosen = min(some, key=lambda c: c.divergence)
        by_labels = max(some, key=lambda c: (c.right, -abs(c.scale - 1)))
        rank = -spearmanr([c.divergence for c in some], [c.mean_test for c in some])[0]
        inputs = {s.detail["validation"]["total"] for s in group.scores if "validation" in s.detail}
        out.append(
            [
                f"{group.model}, {'full' if group.regime == 'full' else 'LoRA'}, {len(group.tasks)} tasks",
                "-".join(str(n) for n in sorted({min(inputs), max(inputs)})),
                str(len(some)),
                f"{rank:.2f}",
                f"`{chosen.method}` x {chosen.scale:g}: {chosen.mean_test:.1f}",
                f"{max(c.mean_test for c in some) - chosen.mean_test:.1f}",
                difference(chosen.test, group.values("average")),
                difference(chosen.test, group.values("actmat")),
                difference(chosen.test, by_labels.test),
            ]
        )
    return out
