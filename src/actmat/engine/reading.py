"""How one part of a tensor is read for the variants of a merge, and what of it is then in memory as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.checkpoints.base import torch_dtype
from actmat.engine.memory import Room
from actmat.engine.reader import TensorReader
from actmat.engine.variant import Variant
from actmat.plan.model import TensorPlan
from actmat.plan.parts import CHUNK, Part, cut
from actmat.plan.reading import Reading, reading_of

__all__ = ["how_to_read", "parts_to_read", "room_bytes"]


def how_to_read(variants: Sequence[Variant], part: Part, reader: TensorReader) -> Reading:
    """The cheapest reading that serves all variants; a rule that is alone may look at less than all at a time."""
    merging = [v for v in variants if v.parts]
    if len(merging) != 1:
        return Reading(walked=False, combined=False, lazy=False, base=True)
    (variant,) = merging
    if variant.item.factored:  # adapters alone: the rule works on factors, no dense delta is formed
        return Reading(walked=False, combined=False, lazy=True, base=True)
    return reading_of(
        variant.method,
        variant.call.options,
        part,
        reader.n_experts,
        reader.compute_dtype.itemsize,
        can_walk=reader.can_walk,
        measured=bool(variant.postprocess.caps) or variant.watch is not None,
        copied=len(variants) > 1,
    )


def parts_to_read(item: TensorPlan, wanted: Sequence[tuple[Part, ...]]) -> Sequence[Part]:
    """The parts that all variants want, the whole tensor where they differ, pieces where it is only copied."""
    if not wanted:
        return cut(item.shape, item.layout, "elementwise")
    return wanted[0] if len(wanted) == 1 else [Part(0, item.numel, item.shape, item.layout)]


def room_bytes(variants: Sequence[Variant], reader: TensorReader) -> int:
    """Bytes of the buffers as large as a part that one tensor takes from the worker's room.

    They are the base as stored (and as a rule wants it), a result, and the deltas, as far as they are held.
    """
    merging = [v for v in variants if v.parts]
    width = reader.compute_dtype.itemsize
    base = torch_dtype(variants[0].item.base_dtype).itemsize
    largest = 0
    for part in parts_to_read(variants[0].item, list(dict.fromkeys(v.parts for v in merging))):
        if part.numel <= CHUNK or not merging:
            continue
        how = how_to_read(variants, part, reader)
        whole = how.deltas(reader.n_experts)
        if not how.combined:
            whole += 1 + any(v.method.uses_base(v.call.options) for v in merging)
        bases = [(base, part.numel)] if how.base else []
        largest = max(largest, Room.bytes_for(*bases, *[(width, part.numel)] * whole))
    return largest
