"""Batches of small units of one shape, which a device merges together (`lockstep`)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from actmat.engine.units import Unit
from actmat.methods import get_method
from actmat.planning.model import MergePlan

Batch = Sequence[Unit]
"""Units that one worker merges together; most are alone."""

BATCHED_ENTRIES = 1 << 18
"""Entries of a matrix up to which units are batched: 512 x 512. A device is busy with larger ones alone."""

BATCH = 16
"""Largest number of units in a batch; each has a thread."""


def batches_of(
    units: Sequence[Unit], plans: Sequence[MergePlan], n_devices: int, room: int, *, in_order: bool = False
) -> list[Batch]:
    """All units in batches, in the order of their first units.

    Units of one batch agree in shape, dtypes and methods, and fit into `room` bytes of a device together. Each device
    gets a share of every shape.

    Args:
        units: in the order in which they should begin.
        plans: of the outputs.
        n_devices: that share them.
        room: bytes that a batch may take.
        in_order: units of one batch also begin in one file, so that no later file delays it.
    """
    files = {n: k for k, shard in enumerate(plans[0].shards) for n in shard.extents} if in_order else {}
    alike: dict[Hashable, list[Unit]] = {}
    for unit in units:
        alike.setdefault((_likeness(unit, plans), _file(unit, plans[0], files)), []).append(unit)
    out: list[Batch] = []
    for group in alike.values():
        most = max(unit.device_bytes for unit in group)
        size = max(1, min(BATCH, -(-len(group) // max(1, n_devices)), room // max(1, most)))
        out += [group[start : start + size] for start in range(0, len(group), size)]
    place = {unit.name: n for n, unit in enumerate(units)}
    return sorted(out, key=lambda batch: place[batch[0].name])


def _file(unit: Unit, plan: MergePlan, files: Mapping[str, int]) -> int:
    """Number of the file of the first plan in which the unit's bytes begin; -1 where that does not matter."""
    outputs = [s.name for (p, n), *_ in unit.groups if p == 0 for s in plan.items[n].outputs]
    return min((files[name] for name in outputs if name in files), default=-1)


def _likeness(unit: Unit, plans: Sequence[MergePlan]) -> Hashable:
    """Units with the same likeness may be in one batch; those that stay alone have one of their own."""
    items = [plans[p].items[n] for group in unit.groups for p, n in group]
    by_matrix = any(i.call is not None and get_method(i.call.method).acts_on == "matrix" for i in items)
    if len(unit.groups) > 1 or items[0].pool or items[0].numel > BATCHED_ENTRIES or not by_matrix:
        return unit.name
    return tuple((p, i.shape, i.expert_dtypes, str(i.call)) for (p, _), i in zip(unit.groups[0], items, strict=True))
