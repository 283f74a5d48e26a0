"""Deltas of one region of a tensor, as methods take them: one by one, all together, chunk by chunk, or as rows.

`RegionDeltas` reads by the strategies of `planning.item.Strategy`; `RowDeltas` gives the base and all deltas as rows of
one matrix: row by row, an expert is read, hashed, converted and reduced by the base while it is in the cache, and inner
products are then those of one matrix.

Shapes: `T` experts, `K = 1 + T` with the base, `S` entries of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.memory import ALIGNMENT
from actmat.engine.reader import BaseEntries, ItemReader, same_bits
from actmat.layout.types import Block, Role, TensorLayout
from actmat.linalg.chunks import CHUNK_ENTRIES, Stacked, walk
from actmat.linalg.inner import PRODUCT, chunk_products
from actmat.linalg.lowrank import LowRank
from actmat.planning.item import Strategy
from actmat.planning.regions import CHUNK, Region


class LazySequence(Sequence[Tensor]):
    """One tensor per expert, made on request."""

    def __init__(self, count: int, make: Callable[[int], Tensor]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, t: int) -> Tensor: ...
    @overload
    def __getitem__(self, t: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, t: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(t, slice):
            return [self._get(i) for i in range(*t.indices(self._count))]
        return self._get(range(self._count)[t])

    def _get(self, t: int) -> Tensor:
        return self._make(t)


class RegionDeltas(LazySequence):
    """Deltas of one region, read by one of the strategies of `planning.item.Strategy`.

    A sequence of tensors in the shape of the region; and, for methods that stream, `linalg.chunks.Streamed`. Each byte
    is hashed and checked when it is read first.

    Args:
        reader: reads and subtracts.
        region: which entries.
        base_raw: the base's entries as stored, held or read chunk by chunk; None without a base.
        strategy: how deltas are given; for `combine` see `RowDeltas`.

    Attributes:
        stages: first stages that were computed, for variants of one family; None where nothing else takes them, so that
            a method may write its result over them.
    """

    def __init__(
        self, reader: ItemReader, region: Region, base_raw: BaseEntries | None, strategy: Strategy = "each"
    ) -> None:
        self._count = reader.n_experts  # no bound method is held: such a cycle keeps factors until it is collected
        self.reader, self.region, self.base_raw = reader, region, base_raw
        self.stages: dict[Any, Any] | None = None
        self._given: set[int] = set()
        self._shared: Tensor | None = None
        self._whole: list[Tensor] | None = None
        # the plan lists items as factored, and modules, only where an expert changes them
        self._changed = strategy == "factors" or reader.item.is_module
        self.shape = region.shape
        self.dtype = reader.compute_dtype
        if strategy == "held" and not reader.item.is_module:
            self.held()

    @property
    def changed(self) -> bool:
        """True if an entry that was read so far is not zero."""
        return self._changed

    @property
    def _stored_base(self) -> BaseEntries:
        assert self.base_raw is not None, "whole deltas are measured from a base"
        return self.base_raw

    @cached_property
    def base(self) -> Tensor:
        """The base on this region in the compute dtype, shaped like it, for a method that takes it."""
        assert isinstance(self.base_raw, Tensor), "a method that takes the base is given it whole"
        return self.reader.converted_base(self.region, self.base_raw)

    @cached_property
    def factors(self) -> list[list[LowRank]]:
        """Per logical matrix of the region, every expert's delta in factored form, float64."""
        if not self.reader.item.is_module:
            return self.reader.factors(self.region)
        split = [split_blocks(self.region.layout.blocks, d) for d in self.whole_factors]
        return [list(group) for group in zip(*split, strict=True)]

    @cached_property
    def whole_factors(self) -> list[LowRank]:
        """Every expert's delta of a module in factored form, its packed maps in one."""
        return self.reader.module_factors()

    def narrowed(self, region: Region) -> RegionDeltas:
        """These deltas, which are held, on a region within theirs; of a module, in other blocks."""
        if self.reader.item.is_module:
            return RegionDeltas(self.reader, region, None, "factors")
        base = narrow(self.base_raw, region) if isinstance(self.base_raw, Tensor) else self.base_raw
        out = RegionDeltas(self.reader, region, base)
        out._whole = [narrow(d, region).view(region.shape) for d in self.held()]
        out._changed = any(bool(d.any()) for d in out._whole)
        return out

    def drain(self) -> None:
        """Read all entries, whose values are only checked."""
        if not self.reader.item.has_base:
            return
        for _ in self if isinstance(self.base_raw, Tensor) else self.walk():
            pass

    def held(self) -> Sequence[Tensor]:
        """All deltas, in memory until the next region is read."""
        chunkable = self.reader.on_host and self.reader.item.is_chunkable
        if self._whole is None and chunkable and self.region.numel > CHUNK:
            flat = [self.reader.buffer(self.region) for _ in range(len(self))]
            for _ in self._chunks(lambda start, numel: [flat_N[start : start + numel] for flat_N in flat]):
                pass
            self._whole = [flat_N.view(self.region.shape) for flat_N in flat]
        elif self._whole is None:
            self._whole = [self._load(t) for t in range(len(self))]
        return self._whole

    def walk(self) -> Iterator[tuple[int, list[Tensor]]]:
        """`(start, pieces_TP)` of consecutive chunks; chunks not held are read again, and overwritten by the next."""
        if self._whole is not None:
            yield from walk(self._whole)
            return
        scratch = self.reader.scratch
        yield from self._chunks(lambda start, numel: [
            scratch.take(t, numel, self.dtype) for t in range(len(self))
        ])  # fmt: skip

    def result(self) -> Tensor:
        """Memory for the merged delta, shaped like the region; contents arbitrary."""
        return self.reader.result(self.region)

    def release(self) -> None:
        """Release held deltas at once: device memory cannot wait for garbage collection."""
        self._whole, self._shared = None, None

    def _get(self, t: int) -> Tensor:
        if self._whole is not None:
            return self._whole[t]
        if t in self._given:
            raise RuntimeError("a method declared one_pass asked for a delta twice; declare one_pass=False")
        self._given.add(t)
        if self._shared is None and self.region.numel > CHUNK:
            self._shared = self.reader.passing_buffer(self.region)
        elif self._shared is None and self.reader.on_host:
            self._shared = self.reader.scratch.take(0, self.region.numel, self.dtype)  # one for all experts
        into = self._shared
        if len(self._given) == len(self):  # the pass ends: the method frees it, before it decomposes anything
            self._shared = None
        return self._load(t, into)

    def _load(self, t: int, into: Tensor | None = None) -> Tensor:
        delta, changed = self.reader.load(t, self.region, self._stored_base, into)
        self._changed |= changed
        return delta

    def _chunks(self, room: Callable[[int, int], list[Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
        """Read all experts chunk by chunk into `room(start, numel)`; they share one conversion of the base."""
        for start in range(0, self.region.numel, CHUNK_ENTRIES):
            base_P = self._stored_base[start : start + CHUNK_ENTRIES]
            pieces_TP = room(start, base_P.numel())
            for t, piece_P in enumerate(pieces_TP):
                self._changed |= self.reader.read_chunk(t, self.region.start + start, base_P, piece_P)
            yield start, pieces_TP


def split_blocks(blocks: tuple[Block, ...], delta: LowRank) -> list[LowRank]:
    """Packed maps of a module one by one: their rows are rows of `b`."""
    if not blocks:
        return [delta]
    layout = TensorLayout(Role.FUSED_LINEAR, "", blocks=blocks)
    return [LowRank(b_OR, delta.a_RI) for b_OR in layout.to_matrices(delta.b_OR)]


def narrow(whole: Tensor, region: Region) -> Tensor:
    """Entries of a region of a whole tensor; at an aligned address, on which the last bits of a BLAS may depend."""
    entries = whole.reshape(-1)[region.start : region.stop]
    return entries if entries.data_ptr() % ALIGNMENT == 0 else entries.clone()


def mapped(deltas: Sequence[Tensor], view: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
    """A view of every delta, made on request."""
    return LazySequence(len(deltas), lambda t: view(deltas[t]))


class RowDeltas:
    """Deltas for passes over chunks, after the base where a method combines it too.

    Values are not checked on reading: the caller detects NaN and Inf from its inner products, and then calls `clear`.

    Attributes:
        base_S: the chunk that was read last, of the base in the compute dtype; the next one overwrites it.
        deltas_TS: that of the deltas.
        basis: those of them that a method combines.
        stored_KS: memory for the base and for an expert as stored; experts share theirs.
    """

    def __init__(self, reader: ItemReader, region: Region, *, with_base: bool) -> None:
        self._reader = reader
        self._region = region
        self._first = 0 if with_base else 1
        self._checks, self._size = False, -1
        self._dtypes = [torch_dtype(name) for name in (reader.item.base_dtype, *reader.item.expert_dtypes)]
        widest, scratch = max(dtype.itemsize for dtype in self._dtypes), reader.scratch
        self._rows_KS = scratch.take("rows", len(self._dtypes) * PRODUCT, reader.compute_dtype).view(-1, PRODUCT)
        self._stored = scratch.take("stored", 2 * PRODUCT * widest, torch.uint8).view(2, -1)
        self._cut(min(PRODUCT, region.numel))

    def inner_products(self) -> Tensor:
        """Inner products of the basis, `linalg.inner.inner_products` of whole tensors to the bit; one pass."""
        chunks = (self.basis for _ in self.chunks())
        return chunk_products(len(self.basis), self._region.shape, self._reader.compute_dtype, chunks)

    def clear(self) -> None:
        """From now on entries are checked, and those that are not finite are cleared (`ItemReader.check`)."""
        self._checks = True

    def chunks(self) -> Iterator[int]:
        """The start of every chunk, once it is read."""
        numel = self._region.numel
        for start in range(0, numel, PRODUCT):
            self._cut(min(PRODUCT, numel - start))
            self._read(self._region.start + start)
            yield start

    def _cut(self, size: int) -> None:
        """Make views of `size` entries, unless the last ones had as many."""
        if size == self._size:
            return
        self._size, rows_KS = size, self._rows_KS[:, :size]
        self.base_S, *self.deltas_TS = rows_KS
        self.basis = Stacked(rows_KS[self._first :])
        self.stored_KS = [
            self._stored[min(k, 1), : size * dtype.itemsize].view(dtype) for k, dtype in enumerate(self._dtypes)
        ]
        self._bytes_K = [raw_bytes(stored_S) for stored_S in self.stored_KS]

    def _read(self, start: int) -> None:
        (base_stored, *stored_TS), (base_bytes, *bytes_T) = self.stored_KS, self._bytes_K
        self._reader.read_stored(0, start * base_stored.itemsize, base_bytes)
        self.base_S.copy_(base_stored)
        for t, (delta_S, stored_S, data) in enumerate(zip(self.deltas_TS, stored_TS, bytes_T, strict=True)):
            self._reader.read_stored(t + 1, start * stored_S.itemsize, data)
            same = same_bits(stored_S, data, base_stored, base_bytes)
            if same:
                delta_S.zero_()
            else:
                delta_S.copy_(stored_S).sub_(self.base_S)
            if self._checks:
                self._reader.check(t, start, delta_S, stored_S, base_stored, same=same)
