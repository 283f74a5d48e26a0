"""Flattened deltas in chunks: runs of consecutive entries that fit a cache, the same entries of all experts together.

Tensors are cut into views. An engine may also pass deltas that it reads and subtracts chunk by chunk (`Streamed`).

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one chunk, `S` of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

CHUNK_ENTRIES = 1 << 19
"""Entries of a chunk: 2 MiB of float32. Smaller chunks stay in a core's private cache, but operations then become so
short that two workers spend their time passing the interpreter's lock: with 2^16 the second worker gains nothing,
with 2^17 a selection takes a quarter longer than with 2^19. No result depends on it."""

CHUNK_ON_DEVICE = 1 << 24
"""Entries of a chunk on accelerators, where the cost of kernel launches sets the size, not a cache."""

SHORT_CHUNK = 1 << 14
"""Entries of a chunk that is widened to float64: a few rows of this length fit a core's private cache."""


@runtime_checkable
class Streamed(Protocol):
    """Deltas that are read chunk by chunk, as often as a method needs; every walk reads and subtracts again."""

    def result(self) -> Tensor:
        """Memory for the merged delta: uninitialized, contiguous, of the shape of a delta; called once."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of every delta."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of every delta."""

    def walk(self) -> Iterator[tuple[int, list[Tensor]]]:
        """`(start, chunks_TP)` in storage order; the next chunk overwrites the memory of this one."""


class Stacked(list[Tensor]):
    """Chunks of equal length that are the rows of one tensor, `rows_TS`, so that one operation can take them all."""

    def __init__(self, rows_TS: Tensor) -> None:
        super().__init__(rows_TS)
        self.rows_TS = rows_TS


def chunk_size(device: torch.device) -> int:
    """Entries of a chunk of a tensor on this device."""
    return CHUNK_ENTRIES if device.type == "cpu" else CHUNK_ON_DEVICE


def chunks_of(flat_N: Tensor) -> Iterator[tuple[int, Tensor]]:
    """`(start, view)` of the consecutive chunks of a 1-D tensor."""
    return ((start, chunk_P) for start, (chunk_P,) in walk([flat_N]))


def walk(deltas: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """`(start, chunks_TP)`: the same run of entries of every flattened delta, in storage order."""
    if isinstance(deltas, Streamed):
        yield from deltas.walk()
        return
    flats_TN = [delta.reshape(-1) for delta in deltas]
    size = chunk_size(flats_TN[0].device)
    for start in range(0, flats_TN[0].numel(), size):
        yield start, [flat_N[start : start + size] for flat_N in flats_TN]


def shape_and_dtype(deltas: Sequence[Tensor]) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a delta, without reading one."""
    if isinstance(deltas, Streamed):
        return deltas.shape, deltas.dtype
    return tuple(deltas[0].shape), deltas[0].dtype


def empty_result(deltas: Sequence[Tensor]) -> Tensor:
    """An uninitialized contiguous tensor of the shape, dtype and device of a delta, sharing no memory with one."""
    if isinstance(deltas, Streamed):
        return deltas.result()
    return torch.empty_like(deltas[0], memory_format=torch.contiguous_format)
