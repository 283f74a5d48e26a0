"""Batches of units, and sizes of workers: decided from the plan's costs and the cluster's nodes, without Ray.

Longest first: a large unit that came last would leave the other workers idle. Or in the order of the output, where its
files are sent when they are finished. Small units travel together, so that the driver's time per tensor stays small; a
batch is short, because a lost worker loses the batch that it was at.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from actmat.engine.units import Unit, planned_seconds
from actmat.errors import MergeError, format_size

UNIT_SECONDS = 1e-3
"""Overhead of a unit, besides its planned time."""
BATCH_SECONDS = 2.0
"""Longest planned time of a batch of several units."""
BATCH_UNITS = 256
"""Most units in a batch: their records travel in one message."""
BATCHES_PER_WORKER = 8
"""Fewest batches per worker, while there are so many units, so that all workers end at nearly the same time."""


@dataclass(frozen=True)
class UnitBatch:
    """Units that one worker merges one after another: all on an accelerator, or none."""

    units: tuple[Unit, ...]

    @property
    def memory(self) -> int:
        """Bytes that the largest unit takes on the host."""
        return max(u.host_bytes for u in self.units)

    @property
    def device(self) -> bool:
        """True if the units compute on an accelerator."""
        return self.units[0].device_bytes > 0


@dataclass(frozen=True)
class Node:
    """One machine of a cluster as Ray counts it: cores, accelerators, bytes of memory."""

    cpus: int
    gpus: int
    memory: int


@dataclass(frozen=True)
class Offer:
    """One worker: the memory that Ray reserves for it, in bytes, and whether it has an accelerator.

    Args:
        memory: reserved.
        process: of this, what the process itself takes.
        device: it has an accelerator.
    """

    memory: int
    process: int
    device: bool = False

    def takes(self, batch: UnitBatch) -> bool:
        """True if the worker can merge the batch."""
        return self.process + batch.memory <= self.memory and (self.device or not batch.device)


def unit_seconds(unit: Unit) -> float:
    """Rough time of a unit on one core, in seconds."""
    return UNIT_SECONDS + planned_seconds(unit)


def make_batches(units: Sequence[Unit], workers: int, *, in_order: bool = False) -> list[UnitBatch]:
    """All units in batches, the longest first; a unit longer than a batch should be is alone.

    Args:
        units: to merge.
        workers: that share them.
        in_order: units keep their order, and batches have that of their first units.
    """
    most = min(BATCH_SECONDS, sum(map(unit_seconds, units)) / max(1, workers * BATCHES_PER_WORKER))
    batches: list[list[Unit]] = []
    latest: dict[bool, tuple[list[Unit], float]] = {}  # by place (accelerator or host): units, and their seconds
    for unit in units if in_order else sorted(units, key=unit_seconds, reverse=True):
        held, seconds = latest.get(unit.device_bytes > 0, ([], 0.0))
        seconds += unit_seconds(unit)
        if not held or len(held) == BATCH_UNITS or seconds > most:
            held, seconds = [], unit_seconds(unit)
            batches.append(held)
        held.append(unit)
        latest[unit.device_bytes > 0] = held, seconds
    return [UnitBatch(tuple(held)) for held in batches]


def plan_offers(nodes: Sequence[Node], units: Sequence[Unit], process: int, most: int | None = None) -> list[Offer]:
    """Workers for these units: one per core, on each node as large as the largest unit needs.

    Where a node has too little memory for that, its first worker has that size and the others share the rest.

    Args:
        nodes: of the cluster.
        units: to merge; at least one.
        process: bytes of a worker without units.
        most: workers at most.

    Raises:
        MergeError: no node takes the largest unit, or none has the accelerator that units need.
    """
    device = {unit.device_bytes > 0 for unit in units}
    if True in device and not any(n.gpus for n in nodes):
        raise MergeError(
            "--device asks for GPUs, but no node of the Ray cluster offers one. Fix: start the nodes with 'ray start "
            "--num-gpus', or leave out --device."
        )
    offers = [offer for node in nodes for offer in _of_node(node, units, process)]
    for wanted in device:
        worst = max((u for u in units if (u.device_bytes > 0) == wanted), key=lambda unit: unit.host_bytes)
        if not any(offer.takes(UnitBatch((worst,))) for offer in offers):
            largest = max((n.memory for n in nodes if n.cpus and (n.gpus or not wanted)), default=0)
            raise MergeError(
                f"No node of the Ray cluster can merge '{worst.name}': its worker needs one core"
                f"{' and a GPU' * wanted} and {format_size(process + worst.host_bytes)}; the largest of "
                f"{len(nodes)} node(s) offers {format_size(largest)}. Ray offers 70 % of a node's memory. Fix: "
                "larger nodes, 'ray start --memory', or a higher --max-memory."
            )
    return sorted(offers, key=lambda offer: (offer.device, offer.memory), reverse=True)[:most]


def _of_node(node: Node, units: Sequence[Unit], process: int) -> list[Offer]:
    """Workers of one node, those with an accelerator first."""
    peaks, moved = [u.host_bytes for u in units], [u.device_bytes > 0 for u in units]
    gpus = min(node.gpus, node.cpus) if any(moved) else 0
    count = gpus if all(moved) else node.cpus
    full, least = process + max(peaks), process + int(statistics.median(peaks))
    if count == 0 or node.memory < process + min(peaks):
        return []
    if count * full <= node.memory:
        sizes = [full] * count
    else:
        first = min(full, node.memory)
        others = min(count - 1, (node.memory - first) // least)
        sizes = [first] + [min(full, (node.memory - first) // others)] * others if others else [first]
    return [Offer(size, process, device=k < gpus) for k, size in enumerate(sizes)]
