"""Merge one tensor: read, apply the rule of every variant, add to the base, cast, write.

Several variants (methods, options, scopes) of one merge share the reading, and those of one family share the first
stage of the computation. Each works on the parts that it would work on alone, so that its bytes do not depend on its
company.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.engine.apply import apply_rule, narrowed
from actmat.engine.deltas import Findings, LazyDeltas, TensorReader
from actmat.engine.memory import Room
from actmat.engine.output import write_piece
from actmat.engine.variant import TensorRecord, Variant
from actmat.engine.watch import Seen
from actmat.plan.model import TensorPlan
from actmat.plan.parts import CHUNK, Part, cut, streams

__all__ = ["merge_tensor", "room_bytes"]


def merge_tensor(variants: Sequence[Variant], reader: TensorReader, findings: Findings) -> list[TensorRecord]:
    """Do one tensor for all variants, merges and copies alike; records come in the order of the variants.

    Where all of them want the same parts, the tensor is read part by part, else whole, and cut in memory.
    """
    began = time.perf_counter()
    members: dict[tuple[Part, ...], list[Variant]] = {}
    for variant in variants:
        if variant.parts:
            members.setdefault(variant.parts, []).append(variant)
    copies = [v for v in variants if not v.parts]
    changed_anywhere = False
    for part in _parts_to_read(variants[0].item, list(members)):
        base_raw = reader.read_base(part)
        for variant in copies:
            write_piece(variant, part, base_raw, None, reader)
        if not members:
            continue
        deltas = reader.deltas(part, base_raw)
        if findings.fatal:  # nothing of this merge will be kept: read on only to find the other bad values
            for _ in deltas:
                pass
            continue
        alone = len(variants) - len(copies) == 1
        lazy = alone and all(v.item.factored or _looks_once(v, part, reader) for (v,) in members.values())
        if alone and lazy and any(v.item.factored for (v,) in members.values()):
            deltas.changed = True  # adapters alone: no dense delta is formed, and the plan lists changed tensors only
        held: Sequence[Tensor] = deltas if lazy else deltas.hold()
        for parts, group in members.items():
            for own in parts if len(members) > 1 else (part,):
                narrow = own is not part
                own_deltas = [narrowed(d, own).view(own.shape) for d in held] if narrow else held
                own_base = narrowed(base_raw, own) if narrow else base_raw
                states: dict[Any, Any] = {}
                for variant in group:
                    value = apply_rule(variant, own, own_deltas, own_base, reader, states)
                    if variant.watch is not None:
                        variant.watch.part(_seen(variant, own, own_deltas, own_base, value, reader, states))
                    changed = any(bool(d.any()) for d in own_deltas) if narrow else deltas.changed
                    write_piece(variant, own, own_base, value if changed else None, reader)
        changed_anywhere |= deltas.changed
    if findings.fatal:
        return []
    base_hash, expert_hashes = reader.hashes()
    share = (time.perf_counter() - began) / len(variants)
    return [
        TensorRecord(
            name=v.item.name,
            hash=v.sink.digest,
            base_hash=base_hash,
            expert_hashes=expert_hashes if v.parts else (),
            stats=v.stats,
            unchanged=not (v.parts and changed_anywhere),
            nonfinite=findings.count(v.item.name) if v.parts else 0,
            seconds=share,
            watched=v.watch.finish() if v.watch is not None else None,
        )
        for v in variants
    ]


def _seen(
    variant: Variant,
    part: Part,
    deltas: Sequence[Tensor],
    base_raw: Tensor,
    value: Tensor,
    reader: TensorReader,
    states: Mapping[Any, Any],
) -> Seen:
    factors = reader.factors(part) if variant.item.factored else None
    shown = () if isinstance(deltas, LazyDeltas) else deltas
    return Seen(part, shown, factors, base_raw, value, states, variant.stats)


def _parts_to_read(item: TensorPlan, wanted: Sequence[tuple[Part, ...]]) -> Sequence[Part]:
    if not wanted:
        return cut(item.shape, item.layout, "elementwise")
    return wanted[0] if len(wanted) == 1 else [Part(0, item.numel, item.shape, item.layout)]


def _looks_once(variant: Variant, part: Part, reader: TensorReader) -> bool:
    """Whether the deltas of the part are looked at once: one pass over one matrix, and nobody measures them after."""
    return _deltas_held(variant, part, reader) < 2


def _deltas_held(variant: Variant, part: Part, reader: TensorReader) -> int:
    """How many deltas of the part are in memory at a time: none that is walked over, one, or all."""
    if variant.postprocess.caps or variant.watch is not None:
        return max(2, reader.n_experts)
    width = reader.compute_dtype.itemsize
    if reader.can_walk and streams(variant.method, variant.call.options, part.numel, reader.n_experts, width):
        return 0
    several = variant.method.acts_on == "matrix" and len(part.layout.matrix_shapes(part.shape)) > 1
    return 1 if variant.method.one_pass and not several else max(2, reader.n_experts)


def room_bytes(variants: Sequence[Variant], reader: TensorReader) -> int:
    """Bytes of the buffers as large as a part that one tensor takes from the worker's room.

    They are the base as stored (and as a rule wants it), a result, and the deltas unless they are read one at a time
    or place by place.
    """
    merging = [v for v in variants if v.parts]
    width = reader.compute_dtype.itemsize
    largest = 0
    for part in _parts_to_read(variants[0].item, list(dict.fromkeys(v.parts for v in merging))):
        if part.numel <= CHUNK or not merging:
            continue
        held = reader.n_experts
        if len(merging) == 1:
            held = min(held, _deltas_held(merging[0], part, reader))
        base = torch_dtype(variants[0].item.base_dtype).itemsize
        converted = any(v.method.uses_base(v.call.options) for v in merging)
        largest = max(largest, Room.bytes_for((base, part.numel), *[(width, part.numel)] * (held + converted + 1)))
    return largest
