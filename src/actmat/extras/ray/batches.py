"""Batches of units, and sizes of workers, from the plan's costs and the cluster's nodes; does not import Ray.

Longest first, because a large last unit would leave the other workers idle; or in output order, if finished files are
sent early. Small units are batched to reduce the driver's time per tensor; batches are short, because a lost worker
loses its current batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from actmat.engine.units import Unit, planned_seconds
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
    """Units that one worker merges in sequence: all on an accelerator, or none."""

    units: tuple[Unit, ...]

    @property
    def memory(self) -> int:
        """Host memory of the largest unit, in bytes."""
        return max(u.host_bytes for u in self.units)

    @property
    def device(self) -> bool:
        """True if the units compute on an accelerator."""
        return self.units[0].device_bytes > 0


@dataclass(frozen=True)
class Node:
    """One machine of a cluster in Ray's terms: cores, accelerators, bytes of memory."""

    cpus: int
    gpus: int
    memory: int


@dataclass(frozen=True)
class Offer:
    """One worker: the memory that Ray reserves for it, in bytes, and whether it has an accelerator.

    Args:
        memory: reserved bytes.
        process: bytes of it that the process itself needs.
        device: whether it has an accelerator.
    """

    memory: int
    process: int
    device: bool = False

    def takes(self, batch: UnitBatch) -> bool:
        """True if the worker can merge the batch."""
        return self.process + batch.memory <= self.memory and (self.device or not batch.device)


def unit_seconds(unit: Unit) -> float:
    """Estimated time of a unit on one core, in seconds."""
    return UNIT_SECONDS + planned_seconds(unit)


def make_batches(units: Sequence[Unit], workers: int, *, in_order: bool = False) -> list[UnitBatch]:
    """Divide units into batches, longest first; a unit longer than the batch limit is a batch of its own.

    Args:
        units: units to merge.
        workers: number of workers.
        in_order: keep the order of units and of batches.
    """
    most = min(BATCH_SECONDS, sum(map(unit_seconds, units)) / max(1, workers * BATCHES_PER_WORKER))
    batches: list[list[Unit]] = []
    latest: dict[bool, tuple[list[Unit], float]] = {}  # on accelerator or host -> units, seconds
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
    """Workers for these units: one per core, each large enough for the largest unit.

    If a node has too little memory for that, its first worker has that size and the others share the rest.

    Args:
        nodes: nodes of the cluster.
        units: units to merge; at least one.
        process: memory of a worker without units, in bytes.
        most: maximum number of workers.

    Raises:
        MergeError: no node can hold the largest unit, or has the accelerator that units need.
    """
    device = {unit.device_bytes > 0 for unit in units}
    if True in device and not any(n.gpus for n in nodes):
        raise MergeError(
            "--device asks for GPUs, but no node of the Ray cluster offers one. Fix: start the nodes with 'ray start "
            "--num-gpus', or remove --device."
        )
    offers = [offer for node in nodes for offer in _of_node(node, units, process)]
    for wanted in device:
        worst = max((u for u in units if (u.device_bytes > 0) == wanted), key=lambda unit: unit.host_bytes)
        if not any(offer.takes(UnitBatch((worst,))) for offer in offers):
            largest = max((n.memory for n in nodes if n.cpus and (n.gpus or not wanted)), default=0)
            raise MergeError(
                f"No node of the Ray cluster can merge '{worst.name}': a worker for it needs one core"
                f"{' and a GPU' * wanted} and {format_size(process + worst.host_bytes)}; the largest of "
                f"{len(nodes)} node(s) offers {format_size(largest)}. Ray offers 70 % of a node's memory. Fix: "
                "larger nodes, 'ray start --memory', or a higher --max-memory."
            )
    return sorted(offers, key=lambda offer: (offer.device, offer.memory), reverse=True)[:most]


def _of_node(node: Node, units: Sequence[Unit], process: int) -> list[Offer]:
    """Workers of one node, with accelerators first."""
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
