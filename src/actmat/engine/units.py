"""Units of work: items that are merged together, each with the variants that share its reading."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from actmat.checkpoints.base import torch_dtype
from actmat.engine.observer import observing_bytes
from actmat.methods import get_method
from actmat.planning.cost import nominal_seconds
from actmat.planning.item import Item, Reading
from actmat.planning.model import MergePlan
from actmat.planning.work import shared_reading

Member = tuple[int, int]
"""Position of a plan in the run, and of an item in that plan."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One item; plain data.

    Args:
        members: the plans that want it, each with its own item.
        name: of the item.
        traffic: bytes read and written.
        seconds: planned time of all variants on a typical core, by which units are ordered and shared out.
        host_bytes: peak memory of one worker.
        device_bytes: peak memory of the device that merges it; 0: it is merged on the host.
        reading: of all its outputs, see `planning.work.shared_reading`; None if the base is only copied.
    """

    members: tuple[Member, ...]
    name: str
    traffic: int
    seconds: float
    host_bytes: int
    device_bytes: int = 0
    reading: Reading | None = None


def plan_units(plans: Sequence[MergePlan], done: Sequence[Collection[str]], *, observed: bool) -> list[Unit]:
    """All unfinished units, in the order of the plans; ties go with their tensor.

    Args:
        done: per plan, names of the items that an earlier run finished.
        observed: whether the run is measured.
    """
    units: dict[str, list[Member]] = {}
    for p, (plan, finished) in enumerate(zip(plans, done, strict=True)):
        for n, item in enumerate(plan.items):
            if item.action != "tie" and item.name not in finished:
                units.setdefault(item.name, []).append((p, n))
    return [_unit(plans, tuple(unit), observed=observed) for unit in units.values()]


def _unit(plans: Sequence[MergePlan], members: tuple[Member, ...], *, observed: bool) -> Unit:
    items = [plans[plan].items[n] for plan, n in members]
    width = torch_dtype(plans[0].recipe.compute_dtype).itemsize
    observing = sum(observing_bytes(i, width) for i in items) if observed else 0
    merging = [i for i in items if i.call is not None]
    reading = shared_reading(items, observed=observed and any(i.is_observed for i in merging))
    planned = max((i.cost.device_bytes for i in merging), default=0)
    together = merging[0].numel * (len(merging[0].sources) + 2) * width if len(merging) > 1 else 0
    device_bytes = _device_bytes(merging, planned, together + observing, plans[0].device_memory)
    return Unit(
        members=members,
        name=items[0].name,
        traffic=max(i.cost.read_bytes + i.cost.write_bytes for i in items),
        seconds=sum(map(nominal_seconds, items)),
        host_bytes=_host_bytes(items, width) + observing + (0 if device_bytes else planned),
        device_bytes=device_bytes,
        reading=reading,
    )


def _host_bytes(group: Sequence[Item], itemsize: int) -> int:
    """Memory for one item: its plan's; where several variants share the deltas, all of these are in memory.

    A method that streams, and so counts no base and no result in its plan, is then given both.
    """
    largest = max(i.cost.host_bytes for i in group)
    if len(group) == 1 or not group[0].has_base:
        return largest
    merging = [i for i in group if i.call is not None]
    together = len(merging[0].sources) if len(merging) > 1 else 0
    if any(get_method(i.call.method).streams(i.call.options) for i in merging if i.call is not None):
        together += 2
        largest += merging[0].numel * torch_dtype(merging[0].base_dtype).itemsize
    return largest + (merging[0].numel * together * itemsize if merging else 0)


def _device_bytes(items: Sequence[Item], planned: int, together: int, room: int | None) -> int:
    """Memory on a device for the items of one unit, which are merged in one place; 0 if that is the host.

    Items that are cheap enough for the host go along with others, those that are too large for a device keep the others
    with them.

    Args:
        items: that are merged, of all variants.
        planned: memory for the largest of them.
        together: memory for all that share the deltas.
        room: memory of a device; None: not known.
    """
    need = planned + together
    fits = room is None or need <= room
    return need if planned and fits and all(i.cost.device_bytes or not _is_heavy(i) for i in items) else 0


def _is_heavy(item: Item) -> bool:
    """True if the item was left to the host because no device can merge it."""
    return item.call is not None and not item.is_factored and get_method(item.call.method).acts_on != "elementwise"
