"""Several deltas looked at place by place, so that all that is done at one place is done while it is in the cache.

Tensors are cut; an engine may hand over deltas that it reads, subtracts and forgets place by place (`Streamed`).

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from actmat.linalg.threshold import PIECE, PIECE_ON_DEVICE

__all__ = [
    "PLACE",
    "HasRoom",
    "Preceded",
    "Stacked",
    "Streamed",
    "empty_result",
    "place_size",
    "preceded_by",
    "shape_and_dtype",
    "walk",
]

PLACE = PIECE
"""Entries of a place."""


@runtime_checkable
class HasRoom(Protocol):
    """Deltas that come with room for what becomes of them."""

    def result(self) -> Tensor:
        """An uninitialised, contiguous tensor of the shape of a delta; asked for once."""


@runtime_checkable
class Streamed(HasRoom, Protocol):
    """Deltas that can be walked over, as often as a rule needs; each walk reads and subtracts anew."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of every delta."""

    @property
    def dtype(self) -> torch.dtype:
        """Of every delta."""

    def walk(self) -> Iterator[tuple[int, list[Tensor]]]:
        """`(start, pieces_TP)` of consecutive places; a piece is overwritten by that of the next place."""


class Stacked(list[Tensor]):
    """Pieces of equal length that are the rows of one tensor, which operations on all of them may take at once."""

    def __init__(self, rows_TS: Tensor) -> None:
        super().__init__(rows_TS)
        self.rows_TS = rows_TS


def place_size(device: torch.device) -> int:
    """Entries of a place of a tensor on that device."""
    return PLACE if device.type == "cpu" else PIECE_ON_DEVICE


def walk(deltas: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """`(start, pieces_TP)` of consecutive places of the flattened deltas: all experts at a place, in storage order."""
    if isinstance(deltas, Streamed):
        yield from deltas.walk()
        return
    flats_TN = [delta.reshape(-1) for delta in deltas]
    size = place_size(flats_TN[0].device)
    for start in range(0, flats_TN[0].numel(), size):
        yield start, [flat_N[start : start + size] for flat_N in flats_TN]


def shape_and_dtype(deltas: Sequence[Tensor]) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a delta, without reading one."""
    if isinstance(deltas, Streamed):
        return deltas.shape, deltas.dtype
    return tuple(deltas[0].shape), deltas[0].dtype


class Preceded(Sequence[Tensor]):
    """`first`, flattened, and the streamed deltas after it, to be walked over alone."""

    def __init__(self, first: Tensor, deltas: Sequence[Tensor]) -> None:
        self._first = first
        self._deltas = deltas
        self.shape, self.dtype = shape_and_dtype(deltas)

    def __len__(self) -> int:
        return 1 + len(self._deltas)

    def __getitem__(self, t: int) -> Tensor:  # type: ignore[override]  # slices have no use here
        raise TypeError("what is streamed is not given as a whole")

    def result(self) -> Tensor:
        """See `HasRoom`."""
        return empty_result(self._deltas)

    def walk(self) -> Iterator[tuple[int, list[Tensor]]]:
        """See `Streamed`."""
        for start, pieces_TP in walk(self._deltas):
            yield start, [self._first[start : start + pieces_TP[0].numel()], *pieces_TP]


def preceded_by(first: Tensor, deltas: Sequence[Tensor]) -> Sequence[Tensor]:
    """`[first, *deltas]`, streamed where the deltas are."""
    return Preceded(first.reshape(-1), deltas) if isinstance(deltas, Streamed) else [first, *deltas]


def empty_result(deltas: Sequence[Tensor]) -> Tensor:
    """An uninitialised contiguous tensor of the shape, dtype and device of a delta, apart from all deltas."""
    if isinstance(deltas, HasRoom):
        return cast("HasRoom", deltas).result()
    return torch.empty_like(deltas[0], memory_format=torch.contiguous_format)
