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

from actmat.engine.apply import apply_rule, narrowed
from actmat.engine.combined import merge_combined
from actmat.engine.deltas import LazyDeltas
from actmat.engine.findings import Findings
from actmat.engine.output import write_piece
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.engine.reading import how_to_read, parts_to_read
from actmat.engine.variant import TensorRecord, Variant
from actmat.engine.watch import Seen
from actmat.plan.parts import Part

__all__ = ["merge_tensor"]


def merge_tensor(variants: Sequence[Variant], reader: TensorReader, findings: Findings) -> list[TensorRecord]:
    """Do one tensor for all variants, merges and copies alike; records come in the order of the variants.

    Where all of them want the same parts, the tensor is read part by part, else whole, and cut in memory.
    """
    began = time.perf_counter()
    members: dict[tuple[Part, ...], list[Variant]] = {}
    for variant in variants:
        if variant.parts:
            members.setdefault(variant.parts, []).append(variant)
    copies, merging = [v for v in variants if not v.parts], [v for v in variants if v.parts]
    changed_anywhere = False
    for part in parts_to_read(variants[0].item, list(members)):
        how = how_to_read(variants, part, reader)
        base_raw: Tensor | StreamedBase = reader.read_base(part) if how.base else StreamedBase(reader, part)
        for variant in copies:
            write_piece(variant, part, base_raw, None, reader)
        if not members:
            continue
        deltas = LazyDeltas(reader, part, base_raw)
        if findings.fatal:  # nothing of this merge will be kept: read on only to find the other bad values
            for _ in deltas if how.base else deltas.walk():
                pass
            continue
        if len(merging) == 1 and merging[0].item.factored:
            deltas.changed = True  # adapters alone: no dense delta is formed, and the plan lists changed tensors only
        if how.combined:
            changed_anywhere |= merge_combined(merging[0], part, base_raw, reader)
            continue
        held: Sequence[Tensor] = deltas if how.lazy else deltas.hold(walked=how.walked)
        for parts, group in members.items():
            for own in parts if len(members) > 1 else (part,):
                narrow = own is not part
                own_deltas = [narrowed(d, own).view(own.shape) for d in held] if narrow else held
                own_base = narrowed(base_raw, own) if narrow and isinstance(base_raw, Tensor) else base_raw
                states: dict[Any, Any] = {}
                for variant in group:
                    value = apply_rule(variant, own, own_deltas, own_base, reader, states)
                    if variant.watch is not None:
                        assert isinstance(own_base, Tensor), "who watches is given everything whole"
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
