"""Norms of the merged delta and of the experts' deltas, from a sample of entries that is cheap in every merge.

    sampled of a tensor of N entries: all of them, or `RUNS` evenly spread runs of `RUN` consecutive ones
    ||D||^2 ~ N / sampled * sum over the sample of D^2

The sample is taken from bytes as they are hashed and from the merged delta as it is written: nothing is read twice.
It does not depend on chunks, workers or devices, so records are the same for all of them. It is kept for the base and
the merged delta; of an expert, only the run that is being read, so that many experts take little more memory than two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.experts.deltas import Deltas, DeltaSource
from actmat.planning.item import Item

RUNS = 16
RUN = 2048
"""Consecutive entries. 32,768 in all take 128 kB for the base and 256 kB for the sum, per worker and however many
experts there are, and give the norm of independent normal entries with a standard error of `1 / sqrt(2 * 32768)`,
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


class Runs:
    """Select the sampled entries of one tensor, whose entries are given in order.

    Attributes:
        each: `(start, stop)` of the runs.
        complete: number of runs whose entries were all given.
        wanted_from: entries before it are not needed.
    """

    def __init__(self, numel: int) -> None:
        self.each = sample_runs(numel)
        self.complete = 0
        self.wanted_from: float = self.each[0][0] if self.each else math.inf

    def cut(self, start: int, flat: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """`(run, position in it, entries)` of the wanted entries from `start` on."""
        stop = start + flat.numel()
        while self.complete < len(self.each) and self.each[self.complete][0] < stop:
            run = self.complete
            low, high = self.each[run]
            first, last = max(low, start), min(high, stop)
            if high <= stop:
                self.complete += 1
            if last > first:
                yield run, first - low, flat[first - start : last - start]
            if high > stop:
                break
        done = self.complete == len(self.each)
        self.wanted_from = math.inf if done else max(self.each[self.complete][0], stop)

    def place(self, run: int) -> slice:
        """Entries of a run within the sample; all runs have the same length."""
        length = self.each[run][1] - self.each[run][0]
        return slice(run * length, (run + 1) * length)


class Sample:
    """Sampled entries of one tensor, in float32 or, if stored in float64, float64; entries are given in order."""

    def __init__(self, numel: int) -> None:
        self.runs = Runs(numel)
        self._entries = torch.empty(0)

    def add(self, start: int, flat: Tensor, scale: float = 1.0) -> None:
        """Store the wanted entries from `start` on."""
        for run, position, entries in self.runs.cut(start, flat):
            if not self._entries.numel():
                wide = torch.float64 if entries.dtype == torch.float64 else torch.float32
                self._entries = torch.zeros(sum(b - a for a, b in self.runs.each), dtype=wide)
            here = self._entries[self.runs.place(run)][position : position + entries.numel()]
            here.copy_(entries)
            if scale != 1.0:
                here.mul_(scale)

    def run(self, k: int) -> Tensor | None:
        """Entries of run `k` in float64; None until they are complete."""
        return self._entries[self.runs.place(k)].double() if k < self.runs.complete else None

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
        total: sum over the experts, complete after `finish`.
        squares: squared norms of the experts' sampled deltas.
        probes: first entries of every expert's delta.
    """

    def __init__(self, item: Item, sources: Sequence[DeltaSource], experts: Sequence[Deltas]) -> None:
        self._sources, self._experts = sources, experts
        self._dtypes = [torch_dtype(item.base_dtype), *(torch_dtype(s.dtype) for s in sources)]
        self._base = Sample(item.numel)
        self._runs = [Runs(item.numel) for _ in sources]
        self._parts: list[Tensor | None] = [None] * len(sources)  # of runs that are not complete
        self._each = sample_runs(item.numel)
        self._added = [0] * len(self._each)  # by run: number of experts in the sum
        self._waiting: dict[tuple[int, int], Tensor] = {}  # (run, expert) -> entries, until those before are there
        self.total = torch.zeros(sum(b - a for a, b in self._each), dtype=torch.float64)
        self.squares = [0.0] * len(sources)
        self.probes: list[Tensor] = []

    def take(self, k: int, offset: int, data: memoryview) -> None:
        """Sample bytes of the base (`k = 0`) or of expert `k - 1` from byte `offset` on, given in order."""
        dtype, runs = self._dtypes[k], self._runs[k - 1]
        start = offset // dtype.itemsize
        if start + len(data) // dtype.itemsize <= (runs if k else self._base.runs).wanted_from:
            return
        entries = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
        if k == 0:
            self._base.add(start, entries)
            return
        for run, position, piece in runs.cut(start, entries):
            whole = self._completed(k - 1, run, position, piece)
            if whole is not None:
                self._waiting[run, k - 1] = whole
                self._add_up(run)

    def finish(self) -> None:
        """Add the formed deltas that no stored one preceded; all bytes were given."""
        for run in range(len(self._each)):
            self._add_up(run)
        assert all(added == len(self._sources) for added in self._added), "every stored expert was read"

    def _completed(self, t: int, run: int, position: int, piece: Tensor) -> Tensor | None:
        """The run, in float64, if this piece completes it."""
        low, high = self._each[run]
        if piece.numel() == high - low:
            return piece.double()
        part = self._parts[t]
        if position == 0 or part is None:
            part = self._parts[t] = torch.empty(high - low, dtype=piece.dtype)
        part[position : position + piece.numel()] = piece
        if position + piece.numel() < high - low:
            return None
        self._parts[t] = None
        return part.double()

    def _add_up(self, run: int) -> None:
        """Add the next experts' deltas as far as they are known: a method may ask for experts in another order."""
        low, high = self._each[run]
        here = slice(run * (high - low), (run + 1) * (high - low))
        base = self._base.run(run)
        while (t := self._added[run]) < len(self._sources):
            source = self._sources[t]
            if source.kind != "stored":
                delta = self._experts[t].dense(source.name, low, high, torch.float64).reshape(-1)
            elif base is not None and (run, t) in self._waiting:
                delta = self._waiting.pop((run, t)) - base
            else:
                break
            delta = delta.nan_to_num_(0.0, 0.0, 0.0)
            self.total[here] += delta
            self.squares[t] += float(delta @ delta)
            self._added[run] += 1
            if run == 0 and len(self._sources) <= MOST_PROBED:
                self.probes.append(delta[:PROBED].clone())


def size_of(item: Item, sample: InputSample, merged: Tensor | None) -> dict[str, Any]:
    """Frobenius norms of the merged delta, of each expert's and of their sum, estimated from a sample.

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
