"""Random masks: uniform (`Drop`), and by the rank of magnitudes within rows (`magnitude_sampled`).

Shapes: `N` entries of a flattened tensor, `P` entries of one chunk of it, `E` entries of small probability, `G` gaps
drawn at a time, `R` rows, `X` rows at a time, `I` entries of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.chunks import CHUNK_ENTRIES

__all__ = ["Drop", "magnitude_sampled", "normalized_ranks", "random_int32"]

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
        """See `linalg.masks.mask.Mask`."""
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
        # 0 and 1 as integers, then as floats: both are vectorised, which making and using booleans is not
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
        generator: gives one uniform number with 24 bits per entry, in storage order.
    """
    if density >= 1 or density <= 0:
        return delta.clone() if density >= 1 else torch.zeros_like(delta)
    width = delta.shape[-1] if delta.dim() else 1
    rows_RI = delta.reshape(math.prod(delta.shape[:-1]), width)
    out_RI = torch.empty_like(rows_RI)
    before, after = 0.0, 0.0
    step = max(2, CHUNK_ENTRIES // max(1, width) // 2 * 2)  # even: two numbers come from one draw
    for x_XI, out_XI in zip(torch.split(rows_RI, step), torch.split(out_RI, step), strict=True):
        keep_XI = (density - epsilon) + 2 * epsilon * normalized_ranks(x_XI.abs())
        uniform_XI = random_int32(x_XI.numel(), generator).view(x_XI.shape).to(x_XI.dtype).mul_(2.0**-32).add_(0.5)
        torch.mul(x_XI, uniform_XI.to(x_XI.device) < keep_XI, out=out_XI)
        if rescale == "inverse":
            out_XI.div_(keep_XI)
        elif rescale == "l1":
            before += float(x_XI.abs().sum(dtype=torch.float64))
            after += float(out_XI.abs().sum(dtype=torch.float64))
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


def _draws(count: int, generator: torch.Generator) -> Tensor:
    return torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=generator)
