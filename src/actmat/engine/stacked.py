"""The base and the deltas of one part, place by place, as rows of one matrix.

Row by row, an expert is read, hashed, converted and reduced by the base while it is in the cache; inner products are
then those of one matrix. Views are made once, because every call of torch may hand the interpreter to another worker.

Shapes: `T` experts, `K = 1 + T` with the base, `S` entries of a place.
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
from actmat.linalg.products import PRODUCT
from actmat.plan.parts import Part

__all__ = ["Place", "StackedDeltas"]


@dataclass(frozen=True, slots=True)
class Place:
    """What is read at one place.

    Args:
        base_S: the base in the compute dtype.
        deltas_TS: the deltas.
        basis: those of them that a rule combines.
        stored_KS: room for the base and each expert as stored; experts lie over one another.
        bytes_K: the same as bytes.
    """

    base_S: Tensor
    deltas_TS: Sequence[Tensor]
    basis: Stacked
    stored_KS: Sequence[Tensor]
    bytes_K: Sequence[memoryview]


class StackedDeltas(Sequence[Tensor]):
    """Deltas to be walked over (`linalg.chunks.Streamed`), after the base where a rule combines it too.

    Nobody looks at what is read: who walks tells from what it computes whether all is finite, and calls `clear` if not.
    """

    def __init__(self, reader: TensorReader, part: Part, *, with_base: bool) -> None:
        self._reader = reader
        self._part = part
        self._first = 0 if with_base else 1
        self._looks = False
        self._dtypes = [torch_dtype(name) for name in (reader.item.base_dtype, *reader.item.expert_dtypes)]
        widest, take = max(dtype.itemsize for dtype in self._dtypes), reader.scratch.take
        self._rows_KS = take("rows", len(self._dtypes) * PRODUCT, reader.compute_dtype).view(-1, PRODUCT)
        self._stored = take("stored", 2 * PRODUCT * widest, torch.uint8).view(2, -1)
        self._place = self._cut(min(PRODUCT, part.numel))
        self.shape, self.dtype = part.shape, reader.compute_dtype

    def __len__(self) -> int:
        return len(self._place.basis)

    def __getitem__(self, t: int) -> Tensor:  # type: ignore[override]  # slices have no use here
        raise TypeError("what is streamed is not given as a whole")

    def result(self) -> Tensor:
        """See `Streamed`."""
        return self._reader.result(self._part)

    def clear(self) -> None:
        """From now on entries are looked at, and those that are not finite are cleared (`TensorReader.look`)."""
        self._looks = True

    def walk(self) -> Iterator[tuple[int, Stacked]]:
        """See `Streamed`."""
        return ((start, place.basis) for start, place in self.places())

    def places(self) -> Iterator[tuple[int, Place]]:
        """The start of every place, and what is there; the next place overwrites it."""
        numel, size = self._part.numel, min(PRODUCT, self._part.numel)
        for start in range(0, numel, PRODUCT):
            place = self._place if start + size <= numel else self._cut(numel - start)
            self._read(self._part.start + start, place)
            yield start, place

    def _cut(self, size: int) -> Place:
        rows_KS = self._rows_KS[:, :size]
        stored_KS = [
            self._stored[min(k, 1), : size * dtype.itemsize].view(dtype) for k, dtype in enumerate(self._dtypes)
        ]
        base_S, *deltas_TS = rows_KS
        return Place(base_S, deltas_TS, Stacked(rows_KS[self._first :]), stored_KS, [raw_bytes(s) for s in stored_KS])

    def _read(self, start: int, place: Place) -> None:
        (base_stored, *stored_TS), (base_bytes, *bytes_T) = place.stored_KS, place.bytes_K
        self._reader.read_stored(0, start * base_stored.itemsize, base_bytes)
        place.base_S.copy_(base_stored)
        for t, (delta_S, stored_S, data) in enumerate(zip(place.deltas_TS, stored_TS, bytes_T, strict=True)):
            self._reader.read_stored(t + 1, start * stored_S.itemsize, data)
            same = same_bits(stored_S, data, base_stored, base_bytes)
            if same:
                delta_S.zero_()
            else:
                delta_S.copy_(stored_S).sub_(place.base_S)
            if self._looks:
                self._reader.look(t, start, delta_S, stored_S, base_stored, same=same)
