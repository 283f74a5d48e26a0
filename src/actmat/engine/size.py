"""Size of a merged delta beside those of the experts, from a sample of entries that every merge can afford.

    sampled of a tensor of N entries: all of them, or `RUNS` evenly spread runs of `RUN` consecutive ones
    ||D||^2 ~ N / sampled * sum over the sample of D^2

The sample is taken from bytes as they are hashed and from the merged delta as it is written: nothing is read twice.
It does not depend on chunks, workers or devices, so records are the same for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.experts.base import Expert, Source
from actmat.plan.model import Item
from actmat.plan.sample import RUN, RUNS, sample_runs

__all__ = ["RUN", "RUNS", "InputSample", "Sample", "added_up", "sample_runs", "size_of"]

DIGITS = 6
"""Significant digits of a norm in a record: more would be noise of the order of summation."""


class Sample:
    """Sampled entries of one tensor, in float32 or, where it is stored so, float64; entries are given in order."""

    def __init__(self, numel: int) -> None:
        self._runs = sample_runs(numel)
        self._next = 0  # the first run that is not complete
        self._filled = 0
        self._entries = torch.empty(0)
        self.wanted_from: float = self._runs[0][0] if self._runs else math.inf  # entries before it are not needed

    def add(self, start: int, flat: Tensor, scale: float = 1.0) -> None:
        """Take what is wanted of the entries from `start` on."""
        stop = start + flat.numel()
        while self._next < len(self._runs) and self._runs[self._next][0] < stop:
            low, high = self._runs[self._next]
            first, last = max(low, start), min(high, stop)
            if last > first:
                self._put(flat[first - start : last - start], scale)
            if high > stop:
                self.wanted_from = stop
                return
            self._next += 1
        self.wanted_from = self._runs[self._next][0] if self._next < len(self._runs) else math.inf

    def add_bytes(self, start: int, data: memoryview, dtype: torch.dtype) -> None:
        """Take what is wanted of stored entries from `start` on."""
        if start + len(data) // dtype.itemsize > self.wanted_from:
            self.add(start, torch.frombuffer(data, dtype=torch.uint8).view(dtype))

    def _put(self, entries: Tensor, scale: float) -> None:
        if not self._entries.numel():
            wide = torch.float64 if entries.dtype == torch.float64 else torch.float32
            self._entries = torch.zeros(sum(b - a for a, b in self._runs), dtype=wide)
        here = self._entries[self._filled : self._filled + entries.numel()]
        here.copy_(entries)
        if scale != 1.0:
            here.mul_(scale)
        self._filled += entries.numel()

    @property
    def entries(self) -> Tensor | None:
        """The sample in float64; None where nothing was given."""
        return self._entries.double() if self._filled else None

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        """The runs of entries that are sampled."""
        return self._runs


class InputSample:
    """Samples of one tensor as the base and every expert store it.

    Args:
        item: the tensor.
        sources: of the experts.
    """

    def __init__(self, item: Item, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._dtypes = [torch_dtype(item.base_dtype), *(torch_dtype(s.dtype) for s in sources)]
        self._samples = [Sample(item.numel) for _ in self._dtypes]

    def take(self, k: int, offset: int, data: memoryview) -> None:
        """Look at bytes of the base (`k = 0`) or of expert `k - 1` from byte `offset` on, given in order."""
        dtype = self._dtypes[k]
        self._samples[k].add_bytes(offset // dtype.itemsize, data, dtype)

    def deltas(self, experts: Sequence[Expert], first: int = 0) -> list[Tensor]:
        """The sampled deltas of experts from `first` on; entries that are not finite count as unchanged."""
        base = self._samples[0].entries
        assert base is not None, "the base was read"
        found = []
        listed = list(zip(experts, self._sources, self._samples[1:], strict=True))
        for expert, source, sample in listed[first:]:
            if source.kind == "stored":
                assert sample.entries is not None, "a stored source was read"
                delta = sample.entries - base
            else:
                pieces = [expert.delta(source.name, low, high, torch.float64).reshape(-1) for low, high in sample.runs]
                delta = torch.cat(pieces)
            found.append(delta.nan_to_num_(0.0, 0.0, 0.0))
        return found


def added_up(deltas: Sequence[Tensor], before: Tensor | None = None) -> Tensor:
    """Sum of sampled deltas, expert by expert, on top of the sum over the experts before them."""
    total = torch.zeros_like(deltas[0]) if before is None else before
    for delta in deltas:
        total = total + delta
    return total


def size_of(
    item: Item,
    deltas: Sequence[Tensor],
    merged: Tensor | None,
    *,
    total: Tensor | None = None,
    norms: Sequence[float] = (),
) -> dict[str, Any]:
    """Frobenius norms of the merged delta, of each expert's and of their sum, estimated from a sample.

    Args:
        item: the tensor.
        deltas: sampled, one per expert.
        merged: sampled, with its scale; None: nothing was changed.
        total: sum of all sampled deltas; default: of these.
        norms: of the experts before these.
    """
    total = added_up(deltas) if total is None else total
    sampled = total.numel()
    share = item.numel / sampled

    def norm(sample: Tensor) -> float:
        value = math.sqrt(share * float(sample @ sample))
        return float(f"{value:.{DIGITS}g}")

    return {
        "norm": norm(merged) if merged is not None else 0.0,
        "sum_norm": norm(total),
        "expert_norms": [*norms, *(norm(d) for d in deltas)],
        "sampled": sampled,
    }
