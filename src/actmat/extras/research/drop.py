"""A mask that keeps entries at random, chunk by chunk.

Shapes: `P` entries of one chunk of a flattened tensor, `E` entries of small probability, `G` gaps drawn at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
        position = int(torch.searchsorted(self._extra_E, stop))
        extra_E, self._extra_E = self._extra_E[:position], self._extra_E[position:]
        return extra_E


def random_int32(count: int, generator: torch.Generator) -> Tensor:
    """`count` uniform 32-bit integers (signed), two per 64-bit draw."""
    return _draws(-(-count // 2), generator).view(torch.int32)[:count]


def _draws(count: int, generator: torch.Generator) -> Tensor:
    return torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=generator)
