"""Masks that keep entries by magnitude. A mask works chunk by chunk and stores nothing of the tensor's size.

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one chunk of it, `L` of its last entries, `O`
rows and `I` columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from actmat.linalg.chunks import chunks_of, shape_and_dtype, walk
from actmat.linalg.masks.threshold import Cut, StreamedCut, kth_magnitudes, outer_cut, true_indices

__all__ = ["Band", "Keep", "Mask", "Trim", "Where", "l1_factors", "top_trims", "top_trims_each", "trim_to_top"]


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


def top_trims(flat_N: Tensor, ranks: Sequence[int], *, exact: bool) -> list[tuple[Trim, Cut]]:
    """The mask of the `k` largest magnitudes, and its threshold, for each `k` of `ranks`.

    `exact` keeps exactly `k`, the first in storage order among equal magnitudes; else all that equal the k-th.
    """
    return [(_trim_at(cut, flat_N.dtype, exact=exact), cut) for cut in kth_magnitudes(flat_N, ranks)]


def top_trims_each(
    deltas: Sequence[Tensor], ranks: Sequence[Sequence[int]], *, exact: bool
) -> list[list[tuple[Trim, Cut]]]:
    """The masks of the `k` largest magnitudes of each delta, for every `k` of its own `ranks`; deltas may be streamed.

    The ranks of one delta share the first pass, as in `top_trims`, and all deltas share their passes.
    """
    shape, dtype = shape_and_dtype(deltas)
    selections = [[_selection(k, math.prod(shape)) for k in own] for own in ranks]
    unfinished = [[s for s in own if s.cut is None] for own in selections]
    is_first = True
    while any(unfinished):
        for _, chunks_TP in walk(deltas):
            for own, chunk_P in zip(unfinished, chunks_TP, strict=True):
                for selection in own[:1] if is_first else own:
                    selection.observe(chunk_P)
        for own in unfinished:
            for other in own[1:] if is_first else ():
                other.join(own[0])
            for selection in own:
                selection.advance()
        unfinished, is_first = [[s for s in own if s.cut is None] for own in unfinished], False
    return [[(_trim_at(s.cut, dtype, exact=exact), s.cut) for s in own if s.cut is not None] for own in selections]


def trim_to_top(delta_OI: Tensor, fraction: float) -> Tensor:
    """A copy in which all but the `round(fraction * O * I)` entries of largest magnitude are zero.

    At least one entry is kept; entries whose magnitude equals the smallest one kept stay as well, so that the result
    does not depend on the order of equal entries.
    """
    flat_N = delta_OI.reshape(-1)
    kept = min(max(round(fraction * flat_N.numel()), 1), flat_N.numel())
    ((trim, _),) = top_trims(flat_N, [kept], exact=False)
    out_N = torch.empty_like(flat_N)
    trim.apply(flat_N, 0, out_N)
    return out_N.view(delta_OI.shape)


def l1_factors(flats_TN: Sequence[Tensor], masks: Sequence[Mask]) -> list[float]:
    """`||x||_1 / ||mask(x)||_1` per expert, which gives a masked delta its L1 norm back; 1 if nothing was kept."""
    factors = []
    for flat_N, mask in zip(flats_TN, masks, strict=True):
        before, after = 0.0, 0.0
        for start, chunk_P in chunks_of(flat_N):
            out_P = torch.empty_like(chunk_P)
            mask.apply(chunk_P, start, out_P)
            before += float(chunk_P.abs().sum(dtype=torch.float64))
            after += float(out_P.abs_().sum(dtype=torch.float64))
        factors.append(before / after if after > 0 else 1.0)
    return factors


def _selection(rank: int, total: int) -> StreamedCut:
    """A selection of one rank, finished already where it does not depend on the entries."""
    return StreamedCut(partial(_of_any_total, rank), None if 0 < rank < total else outer_cut(rank, total))


def _of_any_total(rank: int, total: int) -> int:
    del total
    return rank


def _trim_at(cut: Cut, dtype: torch.dtype, *, exact: bool) -> Trim:
    surplus = exact and cut.value > 0 and cut.above + cut.equal > cut.rank
    return Trim.at(cut.value, dtype, cut.rank - cut.above if surplus else None)
