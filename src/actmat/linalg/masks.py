"""Masks that sparsify a delta. A mask zeroes entries of a flat delta piece by piece; nothing of the tensor's size is
stored for it. `linalg.election` adds masked deltas up.

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one piece of it, `E` rare ones among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from actmat.linalg.places import shape_and_dtype, walk
from actmat.linalg.threshold import PIECE, Cut, StreamedCut, kth_magnitudes, outer_cut, pieces, true_indices

__all__ = [
    "Band",
    "Drop",
    "Keep",
    "Mask",
    "Trim",
    "Where",
    "l1_factors",
    "magnitude_sampled",
    "normalized_ranks",
    "random_int32",
    "top_trims",
    "top_trims_each",
]


class Mask(Protocol):
    """Zeroes some entries of a flat delta. Pieces are asked for in order, from `start = 0` on."""

    def apply(self, piece_P: Tensor, start: int, out_P: Tensor) -> None:
        """Write the masked piece, which begins at entry `start` of the delta, to `out_P`."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Keeps every entry."""

    def apply(self, piece_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask`."""
        out_P.copy_(piece_P)


@dataclass(slots=True)
class Trim:
    """Keeps entries with `|x| >= cut`; of those equal to it, only the first `quota` in storage order, when it is given.

    `level` is what `hardshrink` needs to do so in one vectorised step: it keeps `|x| > level`, so `level` is the
    largest float below the cut; below zero it keeps all, infinite it keeps none.
    """

    cut: float
    level: float
    quota: int | None = None
    _left: int = 0

    @classmethod
    def at(cls, cut: float, dtype: torch.dtype, quota: int | None = None) -> Trim:
        """The trim at a magnitude of that dtype."""
        if cut == 0 or math.isinf(cut):
            return cls(cut, -1.0 if cut == 0 else math.inf)
        below = torch.nextafter(torch.tensor(cut, dtype=dtype), torch.tensor(0.0, dtype=dtype))
        return cls(cut, float(below.item()), quota)

    def apply(self, piece_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask`; a piece at `start = 0` begins the quota anew."""
        torch.hardshrink(piece_P, self.level, out=out_P)
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
        late_P = out_P[late:]
        late_P.addcmul_(late_P, equal_P[late:], value=-1)  # x - x, a fifteenth of `masked_fill_`


@dataclass(frozen=True, slots=True)
class Band:
    """Keeps what `low` keeps and `high` drops (breadcrumbs): neither the smallest nor the largest entries."""

    low: Trim
    high: Trim

    def apply(self, piece_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask`. The entries of `high` are among those of `low`, so the difference is exact."""
        large_P = torch.empty_like(out_P)
        self.high.apply(piece_P, start, large_P)
        self.low.apply(piece_P, start, out_P)
        out_P.sub_(large_P)


@dataclass(frozen=True, slots=True)
class Where:
    """Keeps the entries at which a trim keeps another tensor, `score_N`, and that is not zero there."""

    score_N: Tensor
    trim: Trim

    def apply(self, piece_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask`."""
        self.trim.apply(self.score_N[start : start + piece_P.numel()], start, out_P)
        torch.mul(piece_P, out_P != 0, out=out_P)


@dataclass(slots=True)
class Drop:
    """Keeps each entry independently with probability `density`, the same entries each time for one `seed`.

    The rarer of keeping and dropping, of probability `r <= 1/2`, is drawn: `r = p + (1 - p) q`, where a random byte is
    below `p 2^8 = floor(r 2^8)`, and `q < 2^-7` is what is still missing. Entries of the second kind are so rare that
    the gaps between them are drawn instead (geometric, in float64). The probability is exact to 2^-50, at a seventh of
    the cost of `Tensor.bernoulli_`. Both streams are drawn in the order of the entries by the CPU's Mersenne Twister,
    so neither pieces nor threads nor the device change the mask.
    """

    density: float
    seed: int
    _coarse: torch.Generator = field(default_factory=torch.Generator)
    _fine: torch.Generator = field(default_factory=torch.Generator)
    _left_P: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int8))
    _extra_E: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    _last_extra: int = -1

    def apply(self, piece_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask` and `flags`."""
        if self.density >= 1 or self.density <= 0:
            out_P.copy_(piece_P) if self.density >= 1 else out_P.zero_()
        else:
            out_P.copy_(self.flags(piece_P.numel(), start)).mul_(piece_P)

    def flags(self, numel: int, start: int) -> Tensor:
        """1 where entries from `start` on are kept, else 0, as bytes on the CPU; `start = 0` begins the mask anew."""
        if self.density >= 1 or self.density <= 0:
            return torch.full((numel,), int(self.density >= 1), dtype=torch.int8)
        rare = min(self.density, 1 - self.density)
        bound = math.floor(rare * 2**8)
        if start == 0:
            self._coarse.manual_seed(self.seed)
            self._fine.manual_seed(self.seed ^ 1)
            self._left_P, self._extra_E, self._last_extra = self._left_P[:0], self._extra_E[:0], -1
        draws_P, limit = self._bytes(numel), bound - 2**7
        keeping = self.density <= 0.5
        # 0 and 1 as integers, then as floats: vectorised, which neither making nor using booleans is
        kept_P = draws_P.lt_(limit) if keeping else draws_P.ge_(limit)
        extra_E = self._extras(start + numel, (rare - bound / 2**8) / (1 - bound / 2**8))
        return kept_P.index_fill_(0, extra_E - start, int(keeping))

    def _bytes(self, numel: int) -> Tensor:
        """The next random bytes, signed: what a draw of eight has too many begins the next piece."""
        missing = max(0, numel - self._left_P.numel())
        draws_P = _draws(-(-missing // 8), self._coarse).view(torch.int8)
        if self._left_P.numel():
            draws_P = torch.cat([self._left_P, draws_P])
        self._left_P = draws_P[numel:].clone()
        return draws_P[:numel]

    def _extras(self, stop: int, probability: float) -> Tensor:
        """Entries of the second kind before `stop` that were not asked for yet, ascending."""
        while probability > 0 and self._last_extra < stop:
            gaps_E = torch.empty(_GAPS, dtype=torch.float64).geometric_(probability, generator=self._fine)
            # a gap past the end of every tensor is cut, so that sums stay within 64 bits
            fresh_E = gaps_E.clamp_max_(2.0**48).long().cumsum(0).add_(self._last_extra)
            self._extra_E = torch.cat([self._extra_E, fresh_E])
            self._last_extra = int(fresh_E[-1])
        found = int(torch.searchsorted(self._extra_E, stop))
        extra_E, self._extra_E = self._extra_E[:found], self._extra_E[found:]
        return extra_E


_GAPS = 4096
"""Gaps that are drawn at a time: with a few alone, the calls would cost more than the numbers."""


def random_int32(count: int, generator: torch.Generator) -> Tensor:
    """`count` uniform 32-bit integers (signed), two per 64-bit draw."""
    return _draws(-(-count // 2), generator).view(torch.int32)[:count]


def _draws(count: int, generator: torch.Generator) -> Tensor:
    return torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=generator)


def magnitude_sampled(
    delta: Tensor,
    density: float,
    epsilon: float,
    *,
    rescale: Literal["inverse", "l1", "none"],
    generator: torch.Generator,
) -> Tensor:
    """A delta of which entry `i` is kept with probability `p_i = density - epsilon + 2 epsilon r_i` (DELLA).

    Args:
        delta: any shape; rows are its last axis, a vector is one row.
        density: mean probability; 0 gives zeros, 1 the delta itself.
        epsilon: half the range of the probabilities.
        rescale: divide kept entries by `p_i`, or multiply all by one factor that keeps the L1 norm, or neither.
        generator: a uniform number with 24 bits per entry is drawn from it, in storage order.
    """
    if density >= 1 or density <= 0:
        return delta.clone() if density >= 1 else torch.zeros_like(delta)
    width = delta.shape[-1] if delta.dim() else 1
    rows_RI = delta.reshape(math.prod(delta.shape[:-1]), width)
    out_RI = torch.empty_like(rows_RI)
    before, after = 0.0, 0.0
    step = max(2, PIECE // max(1, width) // 2 * 2)  # even: two numbers come from one draw
    for x_RI, out in zip(torch.split(rows_RI, step), torch.split(out_RI, step), strict=True):
        keep_RI = (density - epsilon) + 2 * epsilon * normalized_ranks(x_RI.abs())
        uniform_RI = random_int32(x_RI.numel(), generator).view(x_RI.shape).to(x_RI.dtype).mul_(2.0**-32).add_(0.5)
        torch.mul(x_RI, uniform_RI.to(x_RI.device) < keep_RI, out=out)
        if rescale == "inverse":
            out.div_(keep_RI)
        elif rescale == "l1":
            before += float(x_RI.abs().sum(dtype=torch.float64))
            after += float(out.abs().sum(dtype=torch.float64))
    if rescale == "l1" and after > 0:
        out_RI.mul_(before / after)
    return out_RI.view(delta.shape)


def normalized_ranks(scores_RI: Tensor) -> Tensor:
    """Rank of each entry within its row, 0 for the smallest and 1 for the largest; equal entries in storage order.

    A row of one entry has rank 0.5.
    """
    width = scores_RI.shape[-1]
    if width == 1:
        return torch.full_like(scores_RI, 0.5)
    order_RI = scores_RI.sort(dim=-1, stable=True).indices
    rank_I = torch.linspace(0, 1, width, dtype=scores_RI.dtype, device=scores_RI.device)
    return torch.empty_like(scores_RI).scatter_(-1, order_RI, rank_I.expand_as(scores_RI))


def top_trims(flat_N: Tensor, ranks: Sequence[int], *, exact: bool) -> list[tuple[Trim, Cut]]:
    """Masks of the `k` largest magnitudes, for each `k` of `ranks`.

    Args:
        flat_N: 1-D delta.
        ranks: how many entries to keep.
        exact: keep exactly `k`, the first in storage order among equal magnitudes; else all that equal the k-th.
    """
    return [(_trim_at(cut, flat_N.dtype, exact=exact), cut) for cut in kth_magnitudes(flat_N, ranks)]


def top_trims_each(deltas: Sequence[Tensor], ranks: Sequence[int], *, exact: bool) -> list[tuple[Trim, Cut]]:
    """The mask of the `k` largest magnitudes of each delta, with a `k` of its own; deltas may be streamed."""
    shape, dtype = shape_and_dtype(deltas)
    total = math.prod(shape)
    selections = [StreamedCut(partial(_of_any_total, k), None if 0 < k < total else outer_cut(k, total)) for k in ranks]
    while any(selection.cut is None for selection in selections):
        for _, pieces_TP in walk(deltas):
            for selection, piece_P in zip(selections, pieces_TP, strict=True):
                selection.observe(piece_P)
        for selection in selections:
            selection.advance()
    cuts = [selection.cut for selection in selections if selection.cut is not None]
    return [(_trim_at(cut, dtype, exact=exact), cut) for cut in cuts]


def _of_any_total(rank: int, total: int) -> int:
    del total
    return rank


def _trim_at(cut: Cut, dtype: torch.dtype, *, exact: bool) -> Trim:
    surplus = exact and cut.value > 0 and cut.above + cut.equal > cut.rank
    return Trim.at(cut.value, dtype, cut.rank - cut.above if surplus else None)


def l1_factors(flats_TN: Sequence[Tensor], masks: Sequence[Mask]) -> list[float]:
    """`||x||_1 / ||mask(x)||_1` per expert: the factor that gives a masked delta its L1 norm back (mergekit).

    1 where nothing was kept.
    """
    factors = []
    for flat_N, mask in zip(flats_TN, masks, strict=True):
        before, after = 0.0, 0.0
        for start, piece_P in pieces(flat_N):
            out_P = torch.empty_like(piece_P)
            mask.apply(piece_P, start, out_P)
            before += float(piece_P.abs().sum(dtype=torch.float64))
            after += float(out_P.abs_().sum(dtype=torch.float64))
        factors.append(before / after if after > 0 else 1.0)
    return factors
