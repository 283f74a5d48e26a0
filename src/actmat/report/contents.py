"""Content hashes of a merged model and of what was read for it, from records that are not in memory together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actmat.checkpoints.hashing import NamesHash
from actmat.engine.task import Record
from actmat.planning.model import Item, MergePlan

__all__ = ["Contents", "model_contents"]


@dataclass(frozen=True, slots=True)
class Contents:
    """Hashes as `hashing.hash_names` gives them.

    Args:
        output: over the tensors of the merged model.
        base, experts: over the tensors that were read.
    """

    output: str
    base: str
    experts: tuple[str, ...]


def model_contents(plan: MergePlan, records: Mapping[str, Record]) -> Contents:
    """Hashes over the tensors of a model, and over those that were read from its base and from each expert.

    A record is read from the disk once for all that list it at the same place: names that differ in a prefix have the
    same order.
    """
    items = plan.items
    everything = tuple(sorted(range(len(items)), key=lambda n: items[n].name))
    orders: dict[tuple[int, ...], list[int]] = {}
    for t in range(len(plan.experts)):
        read = [n for n in everything if _name_in(items[n], t) is not None]
        orders.setdefault(tuple(sorted(read, key=lambda n: _name_in(items[n], t) or "")), []).append(t)
    output, base = NamesHash(), NamesHash()
    experts = [NamesHash() for _ in plan.experts]
    same = orders.pop(everything, [])
    for n in everything:
        item = items[n]
        record = records[item.tied_to or item.name]
        output.add(item.name, record.hash)
        base.add(item.name, record.base_hash)
        for t in same:
            experts[t].add(_name_in(item, t) or "", record.expert_hashes[t])
    for order, listed in orders.items():
        for n in order:
            record = records[items[n].tied_to or items[n].name]
            for t in listed:
                experts[t].add(_name_in(items[n], t) or "", record.expert_hashes[t])
    return Contents(output.hexdigest(), base.hexdigest(), tuple(e.hexdigest() for e in experts))


def _name_in(item: Item, t: int) -> str | None:
    """Name of the tensor that was read from expert `t`, or None."""
    source = item.sources[t] if item.sources else None
    return None if source is None else source.name
