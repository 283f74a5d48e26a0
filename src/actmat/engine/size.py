"""Norms of the merged delta and of the experts' deltas, from a sample of entries that is cheap in every merge.

    sampled of a tensor of N entries: all of them, or `RUNS` evenly spread runs of `RUN` consecutive ones
    ||D||^2 ~ N / sampled * sum over the sample of D^2

The sample is taken from bytes as they are hashed and from the merged delta as it is written: nothing is read twice.
It does not depend on chunks, workers or devices, so records are the same for all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.experts.deltas import Deltas, DeltaSource
from actmat.planning.item import Item

RUNS = 16
RUN = 2048
"""Consecutive entries. 32,768 in all take 128 kB for the base and each expert and 256 kB for the sum, per worker, and
give the norm of independent normal entries with a standard error of `1 / sqrt(2 * 32768)`,
0.4 %; where tails are heavy, or parts of a tensor differ, it is larger.
"""

PROBED = 2048
"""First entries of every tensor from which the overlaps of experts are estimated: 16 kB per expert and worker."""

MOST_PROBED = 16
"""Experts beyond which overlaps are not estimated: records would hold thousands of numbers."""

DIGITS = 6
"""Significant digits of a norm in a record: more would be noise of the order of summation."""


def sample_runs(numel: int) -> list[tuple[int, int]]:
    """`(start, stop)` of the runs of a tensor, in order; they do not overlap.

    >>> sample_runs(10), len(sample_runs(10**9))
    ([(0, 10)], 16)
    """
    if numel <= RUNS * RUN:
        return [(0, numel)] if numel else []
    return [(start, start + RUN) for start in (k * (numel - RUN) // (RUNS - 1) for k in range(RUNS))]


class Sample:
    """Sampled entries of one tensor, in float32 or, if stored in float64, float64; entries are given in order.

    Attributes:
        runs: `(start, stop)` of the runs that are sampled.
        wanted_from: entries before it are not needed.
    """

    def __init__(self, numel: int) -> None:
        self.runs = sample_runs(numel)
        self.wanted_from: float = self.runs[0][0] if self.runs else math.inf
        self._complete = 0  # runs whose entries were all given
        self._entries = torch.empty(0)

    def add(self, start: int, flat: Tensor, scale: float = 1.0) -> None:
        """Store the wanted entries from `start` on."""
        stop = start + flat.numel()
        while self._complete < len(self.runs) and self.runs[self._complete][0] < stop:
            low, high = self.runs[self._complete]
            first, last = max(low, start), min(high, stop)
            if last > first:
                if not self._entries.numel():
                    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
                    self._entries = torch.zeros(sum(b - a for a, b in self.runs), dtype=wide)
                here = self._entries[self.place(self._complete)][first - low : last - low]
                here.copy_(flat[first - start : last - start])
                if scale != 1.0:
                    here.mul_(scale)
            if high > stop:
                break
            self._complete += 1
        is_done = self._complete == len(self.runs)
        self.wanted_from = math.inf if is_done else max(self.runs[self._complete][0], stop)

    def place(self, run: int) -> slice:
        """Entries of a run within the sample; all runs have the same length."""
        length = self.runs[run][1] - self.runs[run][0]
        return slice(run * length, (run + 1) * length)

    def run(self, k: int) -> Tensor:
        """Entries of run `k` in float64, all of which were given."""
        assert k < self._complete, "every stored tensor was read"
        return self._entries[self.place(k)].double()

    @property
    def entries(self) -> Tensor | None:
        """The sample in float64; None if nothing was given."""
        return self._entries.double() if self._entries.numel() else None


class InputSample:
    """Sum of the sampled deltas of one tensor, and their squared norms, from bytes of the base and of every expert.

    Run by run, each sum expert by expert in the recipe's order: the bits do not depend on the pieces in which bytes
    come, nor on their order among experts, nor on threads. Entries that are not finite count as unchanged.

    Args:
        item: the tensor.
        sources: of the experts.
        experts: give the deltas that are formed, not stored.

    Attributes:
        total: sum over the experts; this and the rest are there after `finish`.
        squares: squared norms of the experts' sampled deltas.
        base_square: the same of the base's entries.
        probes: first entries of every expert's delta.
    """

    def __init__(self, item: Item, sources: Sequence[DeltaSource], experts: Sequence[Deltas]) -> None:
        self._sources, self._experts = sources, experts
        self._dtypes = [torch_dtype(item.base_dtype), *(torch_dtype(s.dtype) for s in sources)]
        self._samples = [Sample(item.numel) for _ in self._dtypes]

    def take(self, k: int, offset: int, data: memoryview) -> None:
        """Sample bytes of the base (`k = 0`) or of expert `k - 1` from byte `offset` on, given in order."""
        dtype, sample = self._dtypes[k], self._samples[k]
        start = offset // dtype.itemsize
        if start + len(data) // dtype.itemsize > sample.wanted_from:
            sample.add(start, torch.frombuffer(data, dtype=torch.uint8).view(dtype))

    def finish(self) -> None:
        """Add up the deltas; all bytes were given. Once for every variant that shares the sample."""
        base, *stored = self._samples
        self.total = torch.zeros(sum(b - a for a, b in base.runs), dtype=torch.float64)
        self.squares, self.base_square = [0.0] * len(self._sources), 0.0
        self.probes: list[Tensor] = []
        for run, (low, high) in enumerate(base.runs):
            base_run, here = base.run(run), base.place(run)
            self.base_square += float(base_run.nan_to_num(0.0, 0.0, 0.0).square().sum())
            for t, (source, expert) in enumerate(zip(self._sources, self._experts, strict=True)):
                if source.kind == "stored":
                    delta = stored[t].run(run) - base_run
                else:
                    delta = expert.dense(source.name, low, high, torch.float64).reshape(-1)
                delta = delta.nan_to_num_(0.0, 0.0, 0.0)
                self.total[here] += delta
                self.squares[t] += float(delta @ delta)
                if run == 0 and len(self._sources) <= MOST_PROBED:
                    self.probes.append(delta[:PROBED].clone())


def size_of(item: Item, sample: InputSample, merged: Tensor | None) -> dict[str, Any]:
    """Frobenius norms of the merged delta, of each expert's, of their sum and of the base, estimated from a sample.

    Args:
        item: the tensor.
        sample: of the deltas; finished.
        merged: sampled, with its scale; None: nothing was changed.
    """
    sampled = sample.total.numel()

    def norm(square: float) -> float:
        return float(f"{math.sqrt(item.numel / sampled * square):.{DIGITS}g}")

    return {
        "norm": norm(float(merged @ merged)) if merged is not None else 0.0,
        "sum_norm": norm(float(sample.total @ sample.total)),
        "expert_norms": [norm(square) for square in sample.squares],
        "base_norm": norm(sample.base_square),
        "sampled": sampled,
    }


def products_of(gram_TT: Tensor) -> tuple[float, ...]:
    """Inner products `<D_s, D_t>`, row by row of the upper triangle; ten digits, which equal deltas share.

    >>> products_of(torch.tensor([[2.0, 1.0], [1.0, 1.0]]))
    (2.0, 1.0, 1.0)
    """
    if len(gram_TT) > MOST_PROBED:
        return ()
    pairs = itertools.combinations_with_replacement(range(len(gram_TT)), 2)
    return tuple(float(f"{float(gram_TT[pair]):.10g}") for pair in pairs)
