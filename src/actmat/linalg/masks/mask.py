"""Masks that keep entries by magnitude. A mask works chunk by chunk and stores nothing of the tensor's size.

Random masks are in `linalg.masks.random`; `linalg.masks.election` adds masked deltas up.

Shapes: `N` entries of a flattened tensor, `P` entries of one chunk of it, `L` of its last entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actmat.linalg.masks.threshold import true_indices

__all__ = ["Band", "Keep", "Mask", "Trim", "Where"]


class Mask(Protocol):
    """A function that zeroes some entries of a flat delta. Chunks come in order, from `start = 0` on."""

    def apply(self, chunk_P: Tensor, start: int, out_P: Tensor) -> None:
        """Write the masked chunk, which begins at entry `start` of the delta, to `out_P`."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Keeps every entry."""

    def apply(self, chunk_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask`."""
        out_P.copy_(chunk_P)


@dataclass(slots=True)
class Trim:
    """Keeps entries with `|x| >= cut`; of those equal to `cut`, only the first `quota` in storage order, if given.

    `level` is the argument of `hardshrink`, which keeps `|x| > level` in one vectorised step: the largest float
    below the cut. A negative level keeps every entry, an infinite one keeps none.

    >>> out = torch.empty(4)
    >>> Trim.at(2.0, torch.float32, quota=1).apply(torch.tensor([1.0, -2.0, 2.0, 3.0]), 0, out)
    >>> out.tolist()
    [0.0, -2.0, 0.0, 3.0]
    """

    cut: float
    level: float
    quota: int | None = None
    _left: int = 0

    @classmethod
    def at(cls, cut: float, dtype: torch.dtype, quota: int | None = None) -> Trim:
        """The trim at a magnitude of this dtype."""
        if cut == 0 or math.isinf(cut):
            return cls(cut, -1.0 if cut == 0 else math.inf)
        below = torch.nextafter(torch.tensor(cut, dtype=dtype), torch.tensor(0.0, dtype=dtype))
        return cls(cut, float(below.item()), quota)

    def apply(self, chunk_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask`; a chunk at `start = 0` resets the quota."""
        torch.hardshrink(chunk_P, self.level, out=out_P)
        if self.quota is None:
            return
        self._left = self.quota if start == 0 else self._left
        equal_P, late = out_P.abs().eq_(self.cut), 0
        if self._left > 0:
            count = int(equal_P.sum(dtype=torch.float64 if equal_P.itemsize < 4 else None))
            if count <= self._left:
                self._left -= count
                return
            late, self._left = int(true_indices(equal_P.bool())[self._left]), 0
        late_L = out_P[late:]
        late_L.addcmul_(late_L, equal_P[late:], value=-1)  # x - x takes a fifteenth of the time of `masked_fill_`


@dataclass(frozen=True, slots=True)
class Band:
    """Keeps the entries that `low` keeps and `high` drops: neither the smallest nor the largest (breadcrumbs)."""

    low: Trim
    high: Trim

    def apply(self, chunk_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask`. The entries of `high` are among those of `low`, so the difference is exact."""
        large_P = torch.empty_like(out_P)
        self.high.apply(chunk_P, start, large_P)
        self.low.apply(chunk_P, start, out_P)
        out_P.sub_(large_P)


@dataclass(frozen=True, slots=True)
class Where:
    """Keeps the entries at which a trim keeps a non-zero entry of another tensor, `score_N`."""

    score_N: Tensor
    trim: Trim

    def apply(self, chunk_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask`."""
        self.trim.apply(self.score_N[start : start + chunk_P.numel()], start, out_P)
        torch.mul(chunk_P, out_P != 0, out=out_P)
