"""Merge a pool: several tensors that read the same input, as one matrix.

Their deltas are stacked along `O`, merged once and split again; reading, hashing, adding to the base and writing stay
with each tensor.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.engine.apply import apply_rule
from actmat.engine.deltas import LazyDeltas
from actmat.engine.findings import Findings
from actmat.engine.output import write_piece
from actmat.engine.reader import TensorReader
from actmat.engine.variant import TensorRecord, Variant
from actmat.engine.watch import Seen
from actmat.plan.parts import Part
from actmat.plan.pools import pooled

__all__ = ["merge_pool"]


def merge_pool(
    variants: Sequence[Sequence[Variant]], readers: Sequence[TensorReader], findings: Findings
) -> list[list[TensorRecord]]:
    """Do one pool for all variants; records per variant, per member.

    Args:
        variants: for each output, one variant per member, in the order of their rows.
        readers: one per member, each with buffers of its own.
        findings: where non-finite values are noted.
    """
    began = time.perf_counter()
    items = [v.item for v in variants[0]]
    parts = [Part(0, i.numel, i.shape, i.layout) for i in items]
    base_raw = [r.read_base(p) for r, p in zip(readers, parts, strict=True)]
    lazy = [LazyDeltas(r, p, b) for r, p, b in zip(readers, parts, base_raw, strict=True)]
    rows = pooled(items)
    whole = Part(0, rows.numel, rows.shape, rows.layout)
    first = variants[0][0]
    once = len(variants) == 1 and first.method.one_pass and not first.postprocess.caps and first.watch is None
    deltas: Sequence[Tensor] = _Stacked(lazy) if once else list(_Stacked(lazy))
    states: dict[Any, Any] = {}
    stats = []
    for members in variants:
        leader = dataclasses.replace(members[0], item=pooled([m.item for m in members]), stats={}, watch=None)
        merged = apply_rule(leader, whole, deltas, _flat(base_raw), readers[0], states).view(whole.shape)
        stats.append({"pool": members[0].item.pool, **leader.stats})
        if findings.fatal:
            continue
        row = 0
        for member, part, raw, read, reader in zip(members, parts, base_raw, lazy, readers, strict=True):
            here = slice(row, row + part.shape[0])
            row = here.stop
            value = merged[here].reshape(-1)
            if member.watch is not None:
                own = [d[here] for d in deltas]
                member.watch.part(Seen(part, own, None, raw, value, {}, {}))
            write_piece(member, part, raw, value if read.changed else None, reader)
    if findings.fatal:
        return []
    share = (time.perf_counter() - began) / (len(variants) * len(items))
    return [
        [
            TensorRecord(
                name=member.item.name,
                hash=member.sink.digest,
                base_hash=reader.hashes()[0],
                expert_hashes=reader.hashes()[1],
                stats=found,
                unchanged=not read.changed,
                nonfinite=findings.count(member.item.name),
                seconds=share,
                watched=member.watch.finish() if member.watch is not None else None,
            )
            for member, reader, read in zip(members, readers, lazy, strict=True)
        ]
        for members, found in zip(variants, stats, strict=True)
    ]


class _Stacked(Sequence[Tensor]):
    """The members' deltas of one expert, their rows one below the other; read when asked for."""

    def __init__(self, members: Sequence[LazyDeltas]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members[0])

    def __getitem__(self, t: int) -> Tensor:  # type: ignore[override]  # slices have no use here
        return torch.cat([m[t] for m in self._members])

    def __iter__(self) -> Iterator[Tensor]:
        return (self[t] for t in range(len(self)))


def _flat(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in pieces])
