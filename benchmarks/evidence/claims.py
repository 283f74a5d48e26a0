"""The paper's claims on one group, each as differences with their interval.

Full fine-tuning: ACTMat is first of the methods without data. LoRA: ACTMat is near the first, TSV. A claim is a row per
method that it compares with; every difference is taken per seed and task first, see `intervals.paired`.
"""

from __future__ import annotations

from benchmarks.evidence.group import Group
from benchmarks.evidence.intervals import paired

OTHERS = ("average", "task_arithmetic", "ties", "dare", "iso_c", "tsv")
"""Methods without data of the paper's tables, and those that its related work compares with."""
NEAR = 1.0
"""Points: in the paper's tables of LoRA, ACTMat is 0.2 below TSV to 1.6 above it."""
HEAD = ["claim", "n", "difference", "verdict"]


def claim_rows(group: Group) -> list[list[str]]:
    """A row per other method, for the seeds that both have."""
    own, found = group.points("actmat"), []
    full = group.regime == "full"
    for name in OTHERS if full else ("tsv", "average"):
        gap = paired(own, group.points(name))
        if gap is None:
            continue
        near = not full and name == "tsv"
        seeds = len(own.keys() & group.points(name).keys())
        n = f"{seeds} x {len(group.tasks)}"
        claim = f"`actmat` {'near' if near else 'above'} `{name}`"
        found.append([claim, n, gap.text(sign=True), verdict(gap.mean, gap.half, NEAR if near else 0.0)])
    return found


def verdict(gap: float, half: float | None, near: float = 0.0) -> str:
    """What a difference says of the claim that it is above `-near`.

    >>> verdict(2.0, 1.0), verdict(2.0, 3.0), verdict(-2.0, 3.0), verdict(-2.0, 1.0)
    ('holds', 'holds here, by chance perhaps', 'does not hold here, by chance perhaps', 'does not hold')
    """
    word = "holds" if gap > -near else "does not hold"
    return word if half is not None and abs(gap + near) > half else f"{word} here, by chance perhaps"
