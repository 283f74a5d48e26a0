"""Masks that keep entries by magnitude or at random. A mask works chunk by chunk and stores nothing of a tensor's size.

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one chunk of it, `L` of its last entries, `O`
rows and `I` columns of a matrix, `E` entries of small probability, `G` gaps drawn at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from actmat.linalg.chunks import chunks_of, shape_and_dtype
from actmat.linalg.masks.threshold import Cut, cuts_each, kth_magnitudes, true_indices


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

    `level` is the argument of `hardshrink`, which keeps `|x| > level` in one vectorized step: the largest float
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


def top_trims(flat_N: Tensor, ranks: Sequence[int], *, exact: bool) -> list[tuple[Trim, Cut]]:
    """The mask of the `k` largest magnitudes, and its threshold, for each `k` of `ranks`.

    `exact` keeps exactly `k`, the first in storage order among equal magnitudes; else all that equal the k-th.
    """
    return [(_trim_at(cut, flat_N.dtype, exact=exact), cut) for cut in kth_magnitudes(flat_N, ranks)]


def top_trims_each(
    deltas: Sequence[Tensor], ranks: Sequence[Sequence[int]], *, exact: bool
) -> list[list[tuple[Trim, Cut]]]:
    """The masks of the `k` largest magnitudes of each delta, for every `k` of its own `ranks`; deltas may be streamed.

    All deltas share their passes; see `threshold.cuts_each`.
    """
    dtype = shape_and_dtype(deltas)[1]
    return [[(_trim_at(cut, dtype, exact=exact), cut) for cut in own] for own in cuts_each(deltas, ranks)]


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


def _trim_at(cut: Cut, dtype: torch.dtype, *, exact: bool) -> Trim:
    surplus = exact and cut.value > 0 and cut.above + cut.equal > cut.rank
    return Trim.at(cut.value, dtype, cut.rank - cut.above if surplus else None)


_GAPS = 4096
"""Gaps that are drawn at a time: calls for only a few would cost more than the numbers."""


@dataclass(slots=True)
class Drop:
    """Keeps each entry independently with probability `density`; one `seed` always keeps the same entries.

    The rarer of keeping and dropping, of probability `r <= 1/2`, is drawn: `r = p + (1 - p) q`, where a random byte is
    below `p 2^8 = floor(r 2^8)`, and `q < 2^-7` is the remainder. Entries of the second kind are so rare that the gaps
    between them are drawn instead (geometric, in float64). The probability is exact to 2^-50, at a seventh of the cost
    of `Tensor.bernoulli_`. The CPU's Mersenne Twister draws both streams in the order of the entries, so the mask
    depends neither on chunks nor on threads nor on the device.
    """

    density: float
    seed: int
    _coarse: torch.Generator = field(default_factory=torch.Generator)
    _fine: torch.Generator = field(default_factory=torch.Generator)
    _left_P: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int8))
    _extra_E: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    _last_extra: int = -1

    def apply(self, chunk_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask`."""
        if self.density >= 1 or self.density <= 0:
            out_P.copy_(chunk_P) if self.density >= 1 else out_P.zero_()
        else:
            out_P.copy_(self.flags(chunk_P.numel(), start)).mul_(chunk_P)

    def flags(self, numel: int, start: int) -> Tensor:
        """1 where entries from `start` on are kept, else 0, as bytes on the CPU; `start = 0` restarts the mask."""
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
        # 0 and 1 as integers, then as floats: both are vectorized, which making and using booleans is not
        kept_P = draws_P.lt_(limit) if keeping else draws_P.ge_(limit)
        extra_E = self._extras(start + numel, (rare - bound / 2**8) / (1 - bound / 2**8))
        return kept_P.index_fill_(0, extra_E - start, int(keeping))

    def _bytes(self, numel: int) -> Tensor:
        """The next random bytes, signed; the surplus of a draw of eight goes to the next chunk."""
        missing = max(0, numel - self._left_P.numel())
        draws_P = _draws(-(-missing // 8), self._coarse).view(torch.int8)
        if self._left_P.numel():
            draws_P = torch.cat([self._left_P, draws_P])
        self._left_P = draws_P[numel:].clone()
        return draws_P[:numel]

    def _extras(self, stop: int, probability: float) -> Tensor:
        """Entries of the second kind before `stop` that have not been returned yet, ascending."""
        while probability > 0 and self._last_extra < stop:
            gaps_G = torch.empty(_GAPS, dtype=torch.float64).geometric_(probability, generator=self._fine)
            # a gap past the end of every tensor is cut, so that sums stay within 64 bits
            fresh_G = gaps_G.clamp_max_(2.0**48).long().cumsum(0).add_(self._last_extra)
            self._extra_E = torch.cat([self._extra_E, fresh_G])
            self._last_extra = int(fresh_G[-1])
        found = int(torch.searchsorted(self._extra_E, stop))
        extra_E, self._extra_E = self._extra_E[:found], self._extra_E[found:]
        return extra_E


def random_int32(count: int, generator: torch.Generator) -> Tensor:
    """`count` uniform 32-bit integers (signed), two per 64-bit draw."""
    return _draws(-(-count // 2), generator).view(torch.int32)[:count]


def _draws(count: int, generator: torch.Generator) -> Tensor:
    return torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=generator)
