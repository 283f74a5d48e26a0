"""Batches of units, and sizes of workers: decided from the plan's costs and the cluster's nodes, without Ray.

Longest first: a large unit that came last would leave the other workers idle. Or in the order of the output, where its
files are sent when they are finished. Small units travel together, so that the driver's time per tensor stays small; a
batch is short, because a lost worker loses the batch that it was at.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from actmat.engine.units import Unit
from actmat.errors import MergeError, format_size

FLOPS_PER_SECOND = 2e10
BYTES_PER_SECOND = 5e8
UNIT_SECONDS = 1e-3
"""Rates of one core, and overhead of a unit: only their ratios matter, to order units and to bound batches."""

BATCH_SECONDS = 2.0
"""Work in a batch of several units, by the rates above."""
BATCH_UNITS = 256
"""Most units in a batch: their records travel in one message."""
BATCHES_PER_WORKER = 8
"""Fewest batches per worker, while there are so many units, so that all workers end at nearly the same time."""


@dataclass(frozen=True)
class Batch:
    """Units that one worker merges one after another.

    Args:
        units: in their order.
        memory: bytes that the largest takes.
        device: whether a unit computes on an accelerator.
    """

    units: tuple[Unit, ...]
    memory: int
    device: bool = False


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

    def takes(self, batch: Batch) -> bool:
        """True if the worker can merge the batch."""
        return self.process + batch.memory <= self.memory and (self.device or not batch.device)


def unit_seconds(unit: Unit) -> float:
    """Rough time of a unit on one core, in seconds."""
    return UNIT_SECONDS + unit.flops / FLOPS_PER_SECOND + unit.traffic / BYTES_PER_SECOND


def make_batches(units: Sequence[Unit], device: Sequence[bool], workers: int, *, in_order: bool = False) -> list[Batch]:
    """All units in batches, the longest first; a unit longer than a batch should be is alone.

    Args:
        units: to merge.
        device: per unit, whether it needs an accelerator; a batch holds units of one sort.
        workers: that share them.
        in_order: units keep their order, and batches have that of their first units.
    """
    total = sum(map(unit_seconds, units))
    most = min(BATCH_SECONDS, total / (workers * BATCHES_PER_WORKER)) if workers else BATCH_SECONDS
    order = [(n, unit) for n, unit in enumerate(units)]
    if not in_order:
        order.sort(key=lambda numbered: unit_seconds(numbered[1]), reverse=True)
    batches: list[tuple[float, Batch]] = []  # what they are sorted by
    for wanted in (True, False):
        held: list[tuple[int, Unit]] = []
        seconds = 0.0
        of_sort = [(n, unit) for n, unit in order if device[n] == wanted]
        for n, unit in [*of_sort, (-1, None)]:
            if held and (unit is None or seconds + unit_seconds(unit) > most or len(held) == BATCH_UNITS):
                batch = _batch([u for _, u in held], device=wanted)
                batches.append((held[0][0] if in_order else -seconds, batch))
                held, seconds = [], 0.0
            if unit is not None:
                held.append((n, unit))
                seconds += unit_seconds(unit)
    return [batch for _, batch in sorted(batches, key=lambda b: b[0])]


def _batch(units: Sequence[Unit], *, device: bool) -> Batch:
    return Batch(tuple(units), max(u.host_bytes for u in units), device)


def plan_offers(
    nodes: Sequence[Node], units: Sequence[Unit], device: Sequence[bool], process: int, most: int | None = None
) -> list[Offer]:
    """Workers for these units: one per core, on each node as large as the largest unit needs.

    Where a node has too little memory for that, its first worker has that size and the others share the rest.

    Args:
        nodes: of the cluster.
        units: to merge; at least one.
        device: per unit, whether it needs an accelerator.
        process: bytes of a worker without units.
        most: workers at most.

    Raises:
        MergeError: no node takes the largest unit, or none has the accelerator that units need.
    """
    if any(device) and not any(n.gpus for n in nodes):
        raise MergeError(
            "The merge shall compute on GPUs, and no node of the Ray cluster offers one. Fix: start the nodes with "
            "'ray start --num-gpus', or --device cpu."
        )
    offers = [offer for node in nodes for offer in _of_node(node, units, device, process)]
    for wanted in set(device):
        worst = max((u for u, d in zip(units, device, strict=True) if d == wanted), key=lambda unit: unit.host_bytes)
        if not any(offer.takes(_batch([worst], device=wanted)) for offer in offers):
            largest = max((n.memory for n in nodes if n.cpus and (n.gpus or not wanted)), default=0)
            raise MergeError(
                f"No node of the Ray cluster can merge '{worst.name}': its worker needs one core"
                f"{' and a GPU' * wanted} and {format_size(process + worst.host_bytes)}; the largest of "
                f"{len(nodes)} node(s) offers {format_size(largest)}. Ray offers 70 % of a node's memory. Fix: "
                "larger nodes, 'ray start --memory', or a higher --max-memory."
            )
    return sorted(offers, key=lambda offer: (offer.device, offer.memory), reverse=True)[:most]


def _of_node(node: Node, units: Sequence[Unit], device: Sequence[bool], process: int) -> list[Offer]:
    """Workers of one node, those with an accelerator first."""
    peaks = [u.host_bytes for u in units]
    gpus = min(node.gpus, node.cpus) if any(device) else 0
    count = node.cpus if not all(device) else gpus
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
