"""What is wrong with the values of a merge's inputs, noted while they are read."""

from __future__ import annotations

import threading

__all__ = ["Findings"]


class Findings:
    """What is wrong with the values read so far: NaN and Inf, ties that do not hold. Thread-safe."""

    def __init__(self, *, tolerated: bool) -> None:
        self.tolerated = tolerated
        self._counts: dict[tuple[str, str], int] = {}
        self._broken_ties: list[str] = []
        self.foreign_statistics: list[str] = []
        self._mutex = threading.Lock()

    def add(self, tensor: str, expert: str, count: int) -> None:
        """Note `count` non-finite entries."""
        with self._mutex:
            self._counts[tensor, expert] = self._counts.get((tensor, expert), 0) + count

    def count(self, tensor: str) -> int:
        """Non-finite entries of one tensor, over all experts."""
        with self._mutex:
            return sum(n for (name, _), n in self._counts.items() if name == tensor)

    def add_broken_tie(self, problem: str) -> None:
        """Note two tensors that should be one and differ."""
        with self._mutex:
            self._broken_ties.append(problem)

    def add_foreign_statistics(self, problem: str) -> None:
        """Note a tensor that is not the one that its statistics were measured with."""
        with self._mutex:
            self.foreign_statistics.append(problem)

    @property
    def fatal(self) -> bool:
        """Whether the merge must be given up."""
        return bool(self.foreign_statistics) or bool(self._broken_ties) or (bool(self._counts) and not self.tolerated)

    def problems(self) -> list[str]:
        """One sentence per tensor and expert."""
        bad = {} if self.tolerated else self._counts
        return sorted(self._broken_ties) + [
            f"tensor '{name}' of {who} has {n} value{'s' if n > 1 else ''} that {'are' if n > 1 else 'is'} NaN or Inf"
            for (name, who), n in sorted(bad.items())
        ]
