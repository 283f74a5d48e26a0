"""Batches of units, and sizes of workers, from the plan's costs and the cluster's nodes; does not import Ray.

Longest first, because a large last unit would leave the other workers idle. Small units are batched to reduce the
driver's time per tensor; batches are short, because a lost worker loses its current batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from actmat.engine.units import Unit
from actmat.errors import MergeError, format_size

UNIT_SECONDS = 1e-3
"""Overhead of a unit in seconds, in addition to its planned time."""
BATCH_SECONDS = 2.0
"""Maximum planned time of a batch of several units, in seconds."""
BATCH_UNITS = 256
"""Maximum number of units in a batch, whose records are sent in one message."""
BATCHES_PER_WORKER = 8
"""Minimum number of batches per worker, if there are enough units, so that all workers end at about the same time."""


@dataclass(frozen=True)
class UnitBatch:
    """Units that one worker merges in sequence."""

    units: tuple[Unit, ...]

    @property
    def memory(self) -> int:
        """Host memory of the largest unit, in bytes."""
        return max(u.host_bytes for u in self.units)


@dataclass(frozen=True)
class Node:
    """One machine of a cluster in Ray's terms: cores, bytes of memory."""

    cpus: int
    memory: int


@dataclass(frozen=True)
class Offer:
    """One worker: the memory that Ray reserves for it, in bytes, and the part that the process itself needs."""

    memory: int
    process: int

    def takes(self, batch: UnitBatch) -> bool:
        """True if the worker can merge the batch."""
        return self.process + batch.memory <= self.memory


def unit_seconds(unit: Unit) -> float:
    """Estimated time of a unit on one core, in seconds."""
    return UNIT_SECONDS + unit.seconds


def make_batches(units: Sequence[Unit], workers: int) -> list[UnitBatch]:
    """Divide units into batches, longest first; a unit longer than the batch limit is a batch of its own.

    Args:
        units: units to merge.
        workers: number of workers.
    """
    most = min(BATCH_SECONDS, sum(map(unit_seconds, units)) / max(1, workers * BATCHES_PER_WORKER))
    batches: list[list[Unit]] = []
    total = 0.0
    for unit in sorted(units, key=unit_seconds, reverse=True):
        total += unit_seconds(unit)
        if not batches or len(batches[-1]) == BATCH_UNITS or total > most:
            batches.append([])
            total = unit_seconds(unit)
        batches[-1].append(unit)
    return [UnitBatch(tuple(held)) for held in batches]


def plan_offers(nodes: Sequence[Node], units: Sequence[Unit], process: int, most: int | None = None) -> list[Offer]:
    """Workers for these units: one per core, each large enough for the largest unit.

    If a node has too little memory for that, its first worker has that size and the others share the rest.

    Args:
        nodes: nodes of the cluster.
        units: units to merge; at least one.
        process: memory of a worker without units, in bytes.
        most: maximum number of workers.

    Raises:
        MergeError: no node can hold the largest unit.
    """
    offers = [offer for node in nodes for offer in _of_node(node, units, process)]
    worst = max(units, key=lambda unit: unit.host_bytes)
    if not any(offer.takes(UnitBatch((worst,))) for offer in offers):
        largest = max((n.memory for n in nodes if n.cpus), default=0)
        raise MergeError(
            f"No node of the Ray cluster can merge '{worst.name}': a worker for it needs one core and "
            f"{format_size(process + worst.host_bytes)}; the largest of {len(nodes)} node(s) offers "
            f"{format_size(largest)}. Ray offers 70 % of a node's memory. Fix: larger nodes, 'ray start --memory', or "
            "a higher --max-memory."
        )
    return sorted(offers, key=lambda offer: offer.memory, reverse=True)[:most]


def _of_node(node: Node, units: Sequence[Unit], process: int) -> list[Offer]:
    peaks, count = [u.host_bytes for u in units], node.cpus
    full, least = process + max(peaks), process + int(statistics.median(peaks))
    if count == 0 or node.memory < process + min(peaks):
        return []
    if count * full <= node.memory:
        sizes = [full] * count
    else:
        first = min(full, node.memory)
        others = min(count - 1, (node.memory - first) // least)
        sizes = [first] + [min(full, (node.memory - first) // others)] * others if others else [first]
    return [Offer(size, process) for size in sizes]
