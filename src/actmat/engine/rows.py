"""The base and the deltas of one region, chunk by chunk, as rows of one matrix.

Row by row, an expert is read, hashed, converted and reduced by the base while it is in the cache; inner products are
then those of one matrix. Views are made once, because every call of torch may hand the interpreter to another worker.

Shapes: `T` experts, `K = 1 + T` with the base, `S` entries of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.reader import TensorReader, same_bits
from actmat.linalg.chunks import Stacked
from actmat.linalg.inner import PRODUCT
from actmat.planning.regions import Region

__all__ = ["RowChunk", "RowDeltas"]


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Entries of all inputs at one chunk.

    Args:
        base_S: the base in the compute dtype.
        deltas_TS: the deltas.
        basis: those of them that a method combines.
        stored_KS: memory for the base and for an expert as stored; experts share theirs.
        bytes_K: the same as bytes.
    """

    base_S: Tensor
    deltas_TS: Sequence[Tensor]
    basis: Stacked
    stored_KS: Sequence[Tensor]
    bytes_K: Sequence[memoryview]


class RowDeltas(Sequence[Tensor]):
    """Deltas for passes over chunks (`linalg.chunks.Streamed`), after the base where a method combines it too.

    Values are not checked on reading: the caller detects NaN and Inf from its inner products, and then calls `clear`.
    """

    def __init__(self, reader: TensorReader, region: Region, *, with_base: bool) -> None:
        self._reader = reader
        self._region = region
        self._first = 0 if with_base else 1
        self._checks = False
        self._dtypes = [torch_dtype(name) for name in (reader.item.base_dtype, *reader.item.expert_dtypes)]
        widest, scratch = max(dtype.itemsize for dtype in self._dtypes), reader.scratch
        self._rows_KS = scratch.rows.take(len(self._dtypes) * PRODUCT, reader.compute_dtype).view(-1, PRODUCT)
        self._stored = scratch.stored.take(2 * PRODUCT * widest, torch.uint8).view(2, -1)
        self._chunk = self._cut(min(PRODUCT, region.numel))
        self.shape, self.dtype = region.shape, reader.compute_dtype

    def __len__(self) -> int:
        return len(self._chunk.basis)

    def __getitem__(self, t: int) -> Tensor:  # type: ignore[override]  # slices have no use here
        raise TypeError("what is streamed is not given as a whole")

    def result(self) -> Tensor:
        """See `Streamed`."""
        return self._reader.result(self._region)

    def clear(self) -> None:
        """From now on entries are checked, and those that are not finite are cleared (`TensorReader.check`)."""
        self._checks = True

    def walk(self) -> Iterator[tuple[int, Stacked]]:
        """See `Streamed`."""
        return ((start, chunk.basis) for start, chunk in self.chunks())

    def chunks(self) -> Iterator[tuple[int, RowChunk]]:
        """The start of every chunk, and its entries; the next chunk overwrites them."""
        numel, size = self._region.numel, min(PRODUCT, self._region.numel)
        for start in range(0, numel, PRODUCT):
            chunk = self._chunk if start + size <= numel else self._cut(numel - start)
            self._read(self._region.start + start, chunk)
            yield start, chunk

    def _cut(self, size: int) -> RowChunk:
        rows_KS = self._rows_KS[:, :size]
        stored_KS = [
            self._stored[min(k, 1), : size * dtype.itemsize].view(dtype) for k, dtype in enumerate(self._dtypes)
        ]
        base_S, *deltas_TS = rows_KS
        return RowChunk(
            base_S, deltas_TS, Stacked(rows_KS[self._first :]), stored_KS, [raw_bytes(s) for s in stored_KS]
        )

    def _read(self, start: int, chunk: RowChunk) -> None:
        (base_stored, *stored_TS), (base_bytes, *bytes_T) = chunk.stored_KS, chunk.bytes_K
        self._reader.read_stored(0, start * base_stored.itemsize, base_bytes)
        chunk.base_S.copy_(base_stored)
        for t, (delta_S, stored_S, data) in enumerate(zip(chunk.deltas_TS, stored_TS, bytes_T, strict=True)):
            self._reader.read_stored(t + 1, start * stored_S.itemsize, data)
            same = same_bits(stored_S, data, base_stored, base_bytes)
            if same:
                delta_S.zero_()
            else:
                delta_S.copy_(stored_S).sub_(chunk.base_S)
            if self._checks:
                self._reader.check(t, start, delta_S, stored_S, base_stored, same=same)
