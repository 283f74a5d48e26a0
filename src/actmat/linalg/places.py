"""Several deltas looked at place by place, so that all that is done at one place is done while it is in the cache.

Tensors are cut; an engine may hand over deltas that it reads, subtracts and forgets place by place (`Streamed`).

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from actmat.linalg.threshold import PIECE_ON_DEVICE

__all__ = ["PLACE", "HasRoom", "Streamed", "empty_result", "walk"]

PLACE = 1 << 18
"""Entries of a place, a multiple of 4: 1 MiB of float32. Smaller ones stay in a core's own cache, but then operations
are so short that two workers spend their time handing the interpreter's lock to each other: at 2^16 the second one
brings nothing. Nothing that a rule gives depends on it."""


@runtime_checkable
class HasRoom(Protocol):
    """Deltas that come with room for what becomes of them."""

    def result(self) -> Tensor:
        """An uninitialised, contiguous tensor of the shape of a delta; asked for once."""


@runtime_checkable
class Streamed(HasRoom, Protocol):
    """Deltas that can be walked over."""

    def walk(self) -> Iterator[tuple[int, list[Tensor]]]:
        """`(start, pieces_TP)` of consecutive places; a piece is overwritten by that of the next place."""


def walk(deltas: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """`(start, pieces_TP)` of consecutive places of the flattened deltas: all experts at a place, each place once."""
    if isinstance(deltas, Streamed):
        yield from deltas.walk()
        return
    flats_TN = [delta.reshape(-1) for delta in deltas]
    size = PLACE if flats_TN[0].device.type == "cpu" else PIECE_ON_DEVICE
    for start in range(0, flats_TN[0].numel(), size):
        yield start, [flat_N[start : start + size] for flat_N in flats_TN]


def empty_result(deltas: Sequence[Tensor]) -> Tensor:
    """An uninitialised contiguous tensor of the shape, dtype and device of a delta, apart from all deltas."""
    if isinstance(deltas, HasRoom):
        return cast("HasRoom", deltas).result()
    return torch.empty_like(deltas[0], memory_format=torch.contiguous_format)
