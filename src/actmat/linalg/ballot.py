"""Trimming and sign election over the coordinates of several experts, per tensor or over a whole model.

Shapes: `T` experts, `N` entries of a flattened tensor. Everything is elementwise over the entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

__all__ = ["Poll", "StreamedCut", "elect_mean", "kth_magnitude"]

DIGIT = 16
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def kth_magnitude(flat_N: Tensor, k: int) -> float:
    """The `k`-th largest `|x|`: infinity for `k <= 0`, 0 for `k >= N` (keep nothing, keep everything)."""
    if k <= 0 or k >= flat_N.numel():
        return math.inf if k <= 0 else 0.0
    return float(flat_N.abs().kthvalue(flat_N.numel() - k + 1).values)


@dataclass(slots=True)
class StreamedCut:
    """The k-th largest magnitude of a stream, exact, in one pass per 16-bit digit of its dtype.

    The bits of a non-negative float order like the float, so the value is found digit by digit from histograms, whose
    integer counts add up in any order. Call `observe` with every piece, then `advance`, while that returns True.

    Args:
        rank: total number of entries -> `k`.
    """

    rank: Callable[[int], int]
    cut: float | None = None
    _dtype: torch.dtype = torch.float32
    _shift: int = -1
    _prefix: int = 0
    _above: int = 0
    _total: int = 0
    _counts: Tensor | None = None
    _lock: Lock = field(default_factory=Lock)

    def observe(self, flat_N: Tensor) -> None:
        """Count one piece; all pieces must have one dtype."""
        kind = INTEGERS[flat_N.dtype.itemsize]
        first = self._total == 0
        shift = 8 * flat_N.dtype.itemsize - DIGIT if first else self._shift
        bits = flat_N.reshape(-1).view(kind) & torch.iinfo(kind).max
        if not first:
            bits = bits[(bits >> (shift + DIGIT)) == self._prefix]
        counts = torch.bincount((bits >> shift) & 0xFFFF, minlength=1 << DIGIT).cpu()
        with self._lock:
            self._dtype, self._shift = flat_N.dtype, shift
            self._counts = counts if self._counts is None else self._counts + counts

    def advance(self) -> bool:
        """End a round: True when another pass is needed, False when `cut` is known."""
        if self.cut is not None:
            return False
        counts = torch.zeros(1 << DIGIT, dtype=torch.int64) if self._counts is None else self._counts
        if self._total == 0:
            self._total = int(counts.sum())
        k = self.rank(self._total)
        if k <= 0 or k >= self._total:
            self.cut = math.inf if k <= 0 else 0.0
            return False
        from_top = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, k - self._above))
        digit = counts.numel() - 1 - place
        self._above += int(from_top[place] - counts[digit])
        self._prefix = (self._prefix << DIGIT) | digit
        self._shift, self._counts = self._shift - DIGIT, None
        if self._shift >= 0:
            return True
        self.cut = float(torch.tensor([self._prefix], dtype=INTEGERS[self._dtype.itemsize]).view(self._dtype).item())
        return False


@dataclass(slots=True)
class Poll:
    """A survey of a whole model: rounds that find each expert's threshold.

    Args:
        selections: one per expert.
    """

    selections: tuple[StreamedCut, ...]

    @classmethod
    def of(cls, n_experts: int, rank: Callable[[int], int]) -> Poll:
        """A poll that keeps `rank(total)` of each expert's entries."""
        return cls(tuple(StreamedCut(rank) for _ in range(n_experts)))

    def observe(self, parts: Sequence[Tensor]) -> None:
        """Show the entries of one tensor, one part per expert, in any order of tensors and from any thread."""
        for selection, part in zip(self.selections, parts, strict=True):
            if selection.cut is None:
                selection.observe(part)

    def advance(self) -> bool:
        """End a round; True when another one is wanted."""
        unfinished = [s.advance() for s in self.selections]
        return any(unfinished)

    def finish(self) -> tuple[float, ...]:
        """The threshold of each expert."""
        return tuple(s.cut for s in self.selections if s.cut is not None)


def elect_mean(parts: Sequence[Tensor], cuts: Sequence[float]) -> Tensor:
    """Mean of the trimmed entries that agree with the elected sign, 0 where none does.

    `y_t = x_t` where `|x_t| >= cut_t`, else 0; elected sign `sign(sum_t y_t)`. Votes that cancel exactly elect nothing.
    """
    sign = torch.zeros_like(parts[0])
    for part, cut in zip(parts, cuts, strict=True):
        sign += part * (part.abs() >= cut)
    sign.sign_()
    value, count = torch.zeros_like(sign), torch.zeros_like(sign)
    for part, cut in zip(parts, cuts, strict=True):
        agrees = (part * sign > 0) & (part.abs() >= cut)
        value += part * agrees
        count += agrees
    return value / count.clamp_min_(1)
