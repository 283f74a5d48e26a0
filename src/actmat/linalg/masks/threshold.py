"""Exact order statistics of magnitudes in a few passes, without sorting.

The bits of a non-negative float, read as an integer, order like the float. So the k-th largest magnitude is found
digit by digit: count the leading 15 bits of every entry, pick the bin in which rank k falls, count the next 16 bits
of the entries of that bin, and so on: one round for 16-bit floats, two for float32, four for float64. Counts are
integers and add up in any order, so chunks may come from many tensors and many workers. NaN ranks above infinity.

Measured on one CPU core: 0.7 ns per float32 entry for the first round (`torch.bincount` on chunks that stay in the
cache) and 1.2 ns for the second; `torch.argsort` takes 160 ns.

Shapes: `N` entries of a flattened tensor, `P` entries of one chunk of it, `B` bins of a histogram, `W` words of eight
flags, `S` words with a true flag, `C` true flags in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from actmat.linalg.chunks import CHUNK_ENTRIES, chunks_of, shape_and_dtype, walk

DIGIT = 16
"""Bits of a digit."""

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Cut:
    """The k-th largest magnitude of `total` entries."""

    value: float  # that magnitude; `inf` for `k = 0`, 0 for `k >= total`
    rank: int  # the requested `k`, clamped to `[0, total]`
    above: int  # number of entries with a strictly larger magnitude, `above <= rank`
    equal: int  # number of entries with exactly this magnitude, `above + equal >= rank`
    total: int  # number of all entries

    @property
    def fraction(self) -> float:
        """Fraction of the entries whose magnitude reaches `value` (0 for an empty tensor)."""
        return (self.above + self.equal) / max(self.total, 1)


def kth_magnitudes(deltas: Sequence[Tensor], ranks: Sequence[Sequence[int]]) -> list[list[Cut]]:
    """The `k`-th largest magnitudes of each delta, for every `k` of its own `ranks`, exact for every input.

    The ranks of one delta share the first pass, and all deltas share their passes; deltas may be streamed.

    Args:
        deltas: float16, bfloat16, float32 or float64, any stride.
        ranks: `k >= 1` counts from the largest; see `Cut` for `k <= 0` and `k >= N`.
    """
    total = math.prod(shape_and_dtype(deltas)[0])
    selections = [
        [StreamedCut(k, None if 0 < k < total else outer_cut(k, total)) for k in of_delta] for of_delta in ranks
    ]
    unfinished = [[s for s in of_delta if s.cut is None] for of_delta in selections]
    is_first = True
    while any(unfinished):
        for _, chunks_TP in walk(deltas):
            for of_delta, chunk_P in zip(unfinished, chunks_TP, strict=True):
                for selection in of_delta[:1] if is_first else of_delta:
                    selection.observe(chunk_P)
        for of_delta in unfinished:
            for other in of_delta[1:] if is_first else ():
                other.join(of_delta[0])
            for selection in of_delta:
                selection.advance()
        unfinished, is_first = [[s for s in of_delta if s.cut is None] for of_delta in unfinished], False
    return [[s.cut for s in of_delta if s.cut is not None] for of_delta in selections]


@dataclass(slots=True)
class StreamedCut:
    """The same selection over a stream that is too large to hold: one pass over it per round.

    Call `observe` with every chunk, then `advance`; repeat while that returns True, then read `cut`.
    The order of chunks does not matter. Several workers share a round by a `fork` each, which are joined before
    `advance`. Once `cut` is known, all methods do nothing, so that selections with different numbers of rounds may
    share their passes.

    Args:
        rank: `k`, or a function of the total number of entries, which the first round has counted.
    """

    rank: Callable[[int], int] | int
    cut: Cut | None = None
    _dtype: torch.dtype | None = None
    _round: int = 0
    _bits: int = 0
    _above: int = 0
    _total: int = 0
    _histogram: _Histogram | None = None

    def observe(self, flat_N: Tensor) -> None:
        """Count one chunk for the digit of this round.

        Raises:
            ValueError: the chunk has another dtype than those before it (its digits would not be comparable).
        """
        if self.cut is None:
            self._histogram_of(flat_N.dtype).add(flat_N)

    def fork(self) -> StreamedCut:
        """A selection for another worker, in the same round and without any chunk yet."""
        return replace(self, _histogram=None)

    def join(self, other: StreamedCut) -> None:
        """Add the chunks of a fork of this round, which must not be used afterwards.

        Raises:
            ValueError: they have another dtype.
        """
        if self.cut is None and other._histogram is not None:
            self._histogram_of(other._histogram.dtype).join(other._histogram)

    def _histogram_of(self, dtype: torch.dtype) -> _Histogram:
        """The histogram of this round, of chunks of this dtype."""
        self._dtype = self._dtype or dtype
        if dtype != self._dtype:
            raise ValueError(
                f"a stream of magnitudes needs one dtype: expected {self._dtype}, got {dtype}; "
                "convert all deltas to the compute dtype first"
            )
        if self._histogram is None:
            self._histogram = _Histogram(dtype, _shifts(dtype)[self._round], None if self._round == 0 else self._bits)
        return self._histogram

    def advance(self) -> bool:
        """End a round: True when another pass is needed, False when `cut` is known."""
        if self.cut is not None:
            return False
        if self._round == 0:
            self._total = 0 if self._histogram is None else int(self._histogram.counts().sum())
        k = self.rank if isinstance(self.rank, int) else self.rank(self._total)
        if not 0 < k < self._total:
            self.cut = outer_cut(k, self._total)
            return False
        assert self._histogram is not None, "every round sees the same chunks"
        counts, dtype = self._histogram.counts(), self._histogram.dtype
        digit, larger = _locate(counts, k - self._above)
        equal = int(counts[digit])
        self._bits, self._above = (self._bits << DIGIT) | digit, self._above + larger
        self._round, self._histogram = self._round + 1, None
        if self._round < len(_shifts(dtype)):
            return True
        value = float(torch.tensor([self._bits], dtype=INTEGERS[dtype.itemsize]).view(dtype).item())
        self.cut = Cut(value, k, self._above, equal, self._total)
        return False


def selection_workspace(entries: int) -> int:
    """Elements of float32 that `kth_magnitudes` holds at its peak: four histograms of 64-bit counts, three chunks."""
    return 4 * 2 * (1 << DIGIT) + 3 * min(entries, CHUNK_ENTRIES)


def _shifts(dtype: torch.dtype) -> range:
    """Position of each digit, the most significant first; that one has 15 bits, because the sign is masked out."""
    return range(8 * dtype.itemsize - DIGIT, -1, -DIGIT)


class _Histogram:
    """Histogram of the digit at `shift`, of all entries or of those whose higher bits are `prefix`.

    Entries with the prefix are usually few, so they are gathered from several chunks before they are counted, except
    those whose digit is 0: differences of 16-bit floats are short numbers, so that a bin may hold a tenth of all
    entries, each with digit 0 (or all of them, in a delta that is mostly zero). These are counted in place.
    """

    def __init__(self, dtype: torch.dtype, shift: int, prefix: int | None) -> None:
        self.dtype = dtype
        self._shift = shift
        self._prefix = prefix
        self._bins = 1 << (DIGIT - 1) if prefix is None else 1 << DIGIT
        self._counts: Tensor | None = None
        self._with_digit_0 = 0
        self._waiting: list[Tensor] = []

    def add(self, flat_N: Tensor) -> None:
        """Count the entries of a tensor."""
        for _, chunk_P in chunks_of(flat_N):
            kind = INTEGERS[chunk_P.dtype.itemsize]
            bits_P = chunk_P.view(kind) & torch.iinfo(kind).max  # of magnitudes
            if self._prefix is None:
                self._tally(bits_P.bitwise_right_shift_(self._shift))
                continue
            above = self._shift + DIGIT
            offset_P = bits_P.sub_(self._prefix << above)  # from the first number of the bin on
            self._with_digit_0 += int(_at_least(offset_P, 0) - _at_least(offset_P, 1 << self._shift))
            digit_P = offset_P.clamp_(0, 1 << above).bitwise_right_shift_(self._shift).bitwise_and_(0xFFFF)
            self._waiting.append(digit_P[true_indices(digit_P.bool())])  # outside the bin both ends have digit 0
            self._flush(CHUNK_ENTRIES)

    def join(self, other: _Histogram) -> None:
        """Add the counts of another histogram of the same digit and prefix, which must not be used afterwards."""
        other._flush(0)
        if other._counts is not None:
            mine = self._counts
            self._counts = other._counts if mine is None else mine.add_(other._counts.to(mine.device))
        self._with_digit_0 += other._with_digit_0

    def counts(self) -> Tensor:
        """Entries per digit, so far."""
        self._flush(0)
        counts_B = torch.zeros(self._bins, dtype=torch.int64) if self._counts is None else self._counts.cpu().clone()
        counts_B[0] += self._with_digit_0
        return counts_B

    def __getstate__(self) -> dict[str, Any]:
        """Counts on the CPU: another process may have no such device."""
        self._flush(0)
        return vars(self) | {"_counts": None if self._counts is None else self._counts.cpu()}

    def _flush(self, limit: int) -> None:
        if self._waiting and sum(w.numel() for w in self._waiting) >= limit:
            self._tally(torch.cat(self._waiting))
            self._waiting.clear()

    def _tally(self, digits_P: Tensor) -> None:
        counts_B = torch.bincount(digits_P, minlength=self._bins)
        self._counts = counts_B if self._counts is None else self._counts.add_(counts_B)


def _at_least(numbers_P: Tensor, low: int) -> Tensor:
    """Number of integers `>= low`, computed in integers because comparisons that give booleans are not vectorized."""
    return torch.ge(numbers_P, low, out=torch.empty_like(numbers_P)).sum(dtype=numbers_P.dtype)


def true_indices(flags_N: Tensor) -> Tensor:
    """Indices of the true entries of a 1-D tensor, ascending; a fraction of the cost of `nonzero` where few are true.

    Flags are bytes, so eight at a time are tested as one word, and single flags only in words that are not zero.
    """
    whole = flags_N.numel() // 8 * 8
    words_W = flags_N[:whole].view(torch.int64)
    some_S = words_W.nonzero().squeeze(1)
    inside_C = words_W.index_select(0, some_S).view(torch.bool).nonzero().squeeze(1)  # index within these words
    near_C = some_S.index_select(0, inside_C >> 3).mul_(8).add_(inside_C.bitwise_and_(7))
    if whole == flags_N.numel():
        return near_C
    return torch.cat([near_C, flags_N[whole:].nonzero().squeeze(1) + whole])


def _locate(counts_B: Tensor, k: int) -> tuple[int, int]:
    """Bin that holds the k-th entry from the top, and the number of entries in the bins above it."""
    from_top_B = counts_B.flip(0).cumsum(0)
    index = int(torch.searchsorted(from_top_B, k))
    digit = counts_B.numel() - 1 - index
    return digit, int(from_top_B[index] - counts_B[digit])


def outer_cut(k: int, total: int) -> Cut:
    """The `Cut` of a rank that does not depend on the data: nothing is kept (`k <= 0`), or everything."""
    if k <= 0:
        return Cut(math.inf, 0, 0, 0, total)
    return Cut(0.0, total, total, 0, total)
