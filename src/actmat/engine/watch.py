"""Watching a merge: who measures what a rule is given and what it gives is told here, and stays out of the engine.

A watch belongs to one tensor of one output and to one thread at a time. What it returns goes, as it is, into the
tensor's record, so that an interrupted merge keeps what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method
from actmat.plan.model import TensorPlan
from actmat.plan.parts import Part, cut

__all__ = ["WATCHED", "NoWriter", "Seen", "Sink", "SinkSource", "Watch", "watch_bytes"]

WATCHED = "watched"
"""Key of a record under which lies what its watch returned."""

WORKSPACE_ROWS = 512
"""Rows beside the matrices themselves for which `watch_bytes` makes room: probes, panels, pieces."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One part of a tensor, after its rule; nothing of it may be kept or changed.

    Args:
        part: which entries.
        deltas: one per expert, shaped like the part; empty where the rule worked on factors.
        factors: per logical matrix of the part, the experts' factors; None where the rule saw dense deltas.
        base: the base's entries as stored, flat.
        merged: the merged delta, flat, before its scale.
        states: first stages of rules, by (key of the stage, weights as text, logical matrix).
        stats: what the rule noted of this tensor so far.
    """

    part: Part
    deltas: Sequence[Tensor]
    factors: Sequence[Sequence[LowRank]] | None
    base: Tensor
    merged: Tensor
    states: Mapping[Any, Any]
    stats: Mapping[str, Any]


class Watch(Protocol):
    """Looks at the parts of one tensor, in order."""

    def part(self, seen: Seen) -> None:
        """One part is merged."""

    def factored(self, label: str, deltas: Sequence[LowRank], merged: LowRank, stats: Mapping[str, Any]) -> None:
        """One map of an adapter's module is merged, in factored form, before its scale and the cut of its rank."""

    def finish(self) -> dict[str, Any]:
        """Plain data for the record; called once, after the last part."""


class Sink(Protocol):
    """Where the bytes of one tensor go."""

    def write(self, data: memoryview) -> None:
        """Append bytes."""

    @property
    def digest(self) -> str:
        """Content hash of all bytes."""


class SinkSource(Protocol):
    """Gives sinks."""

    def sink(self, name: str, aliases: Sequence[str] = ()) -> Sink:
        """Where tensor `name` goes."""


class NoWriter:
    """Sinks for a merge that is only watched: nothing is kept, nothing is hashed."""

    def sink(self, name: str, aliases: Sequence[str] = ()) -> Sink:
        """Nowhere."""
        return _Nowhere()


class _Nowhere:
    digest = ""

    def write(self, data: memoryview) -> None:
        """Drop it."""


def watch_bytes(item: TensorPlan, itemsize: int) -> int:
    """Memory that watching a tensor takes on top of merging it: all deltas of one part at once, `S`, probes, copies."""
    if item.call is None:
        return 0
    experts, method = len(item.sources), get_method(item.call.method)
    streams = method.streams(item.call.options)
    whole = 3 * item.numel if streams else 0  # base, base converted and result, of which its plan may count pieces
    if not item.layout.role.is_matrix:  # nothing is measured, but deltas that the plan counts one by one are held
        once = method.acts_on == "tensor" and (method.one_pass or streams)
        return itemsize * (experts * item.numel + whole) if once else 0
    largest = max(cut(item.shape, item.layout, "matrix"), key=lambda p: p.numel)
    rows, columns = max(largest.layout.matrix_shapes(largest.shape), key=math.prod)[-2:]
    side = min(max(rows, columns), experts * rows)
    entries = (2 * experts + 2) * largest.numel + 3 * side * side + WORKSPACE_ROWS * ((experts + 1) * columns + rows)
    return itemsize * (entries + whole)
