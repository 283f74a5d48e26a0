"""The observer of a merge: receives a method's inputs and output, and measures them; and the writer of its bytes.

An observer belongs to one item of one output and to one thread at a time. Its result goes unchanged into the
item's record, so that an interrupted merge keeps its measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method
from actmat.planning.item import Item
from actmat.planning.regions import Region, cut


@dataclass(frozen=True, slots=True)
class ObservedMerge:
    """One region of an item, after its method; nothing of it may be kept or changed.

    Args:
        region: which entries.
        deltas: one per expert, shaped like the region; empty if the method worked on factors.
        factors: per logical matrix of the region, the experts' factors; None if the method took dense deltas.
        base: the base's entries as stored, flat; None without a base.
        value: the merged delta before its scale: flat, or as factors of the one logical matrix of the region.
    """

    region: Region
    deltas: Sequence[Tensor]
    factors: Sequence[Sequence[LowRank]] | None
    base: Tensor | None
    value: Tensor | LowRank

    @property
    def stored(self) -> Tensor:
        """The base's entries, of a tensor of a model."""
        assert self.base is not None
        return self.base


class Observer(Protocol):
    """Measures the regions of one item, in order."""

    def region(self, merged: ObservedMerge) -> None:
        """Measure one merged region."""

    def finish(self) -> dict[str, Any]:
        """Plain data for the record; called once, after the last region."""


ObserverFactory = Callable[[Item], Observer]
"""Makes the observer of an item; picklable, so that any worker can make its own."""

WORKSPACE_ROWS = 512
"""Rows for which `observing_bytes` makes room on top of the matrices: probes, panels, chunks."""


def observing_bytes(item: Item, itemsize: int) -> int:
    """Memory that observing an item takes on top of merging it: all deltas of one region at once, probes, copies.

    Args:
        itemsize: of the compute dtype.
    """
    if item.call is None or item.is_module or not item.is_observed:
        return 0
    experts, streams = len(item.sources), get_method(item.call.method).streams(item.call.options)
    whole = 3 * item.numel if streams else 0  # base, base converted and result, of which a plan may count chunks
    largest = max(cut(item.shape, item.layout, "matrix"), key=lambda p: p.numel)
    rows, columns = max(largest.layout.matrix_shapes(largest.shape), key=math.prod)[-2:]
    entries = (2 * experts + 2) * largest.numel + WORKSPACE_ROWS * ((experts + 1) * columns + rows)
    return itemsize * (entries + whole)


class ByteSink(Protocol):
    """Receives the bytes of one tensor."""

    def write(self, data: memoryview) -> None:
        """Append bytes."""

    @property
    def digest(self) -> str:
        """Content hash of all bytes."""


class Writer(Protocol):
    """Makes the sinks of one output; in place of a writer, None: the merge is only measured, nothing is kept."""

    def sink(self, name: str, aliases: Sequence[str] = ()) -> ByteSink:
        """The sink of tensor `name`; `aliases` get the same bytes."""
