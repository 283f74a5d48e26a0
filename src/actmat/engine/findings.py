"""Problems with the values of a merge's inputs, found while they are read. Plain values: they pickle and add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Findings:
    """NaN and Inf, ties that do not hold, statistics of another model.

    Args:
        nonfinite: (tensor, input) -> number of NaN or Inf.
        broken_ties: one sentence each.
        foreign_statistics: one sentence each.
    """

    nonfinite: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken_ties: list[str] = field(default_factory=list)
    foreign_statistics: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add all findings of another unit."""
        self.nonfinite.update(other.nonfinite)
        self.broken_ties += other.broken_ties
        self.foreign_statistics += other.foreign_statistics

    @property
    def fatal(self) -> bool:
        """True if the merge must stop."""
        return bool(self.foreign_statistics or self.broken_ties or self.nonfinite)

    def problems(self) -> list[str]:
        """One sentence per broken tie, and per tensor and input with NaN or Inf."""
        return sorted(self.broken_ties) + [
            f"tensor '{name}' of {who} has {n} value{'s' if n > 1 else ''} that {'are' if n > 1 else 'is'} NaN or Inf"
            for (name, who), n in sorted(self.nonfinite.items())
        ]
