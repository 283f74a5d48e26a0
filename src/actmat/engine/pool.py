"""Merge a pool: several tensors that read the same input, as one matrix.

Their deltas are stacked along `O`, merged once and split again; reading, hashing, adding to the base and writing stay
with each tensor.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.engine.apply import apply_method
from actmat.engine.deltas import Deltas, stacked
from actmat.engine.findings import Findings
from actmat.engine.needs import Surroundings
from actmat.engine.observer import Merged
from actmat.engine.reader import TensorReader
from actmat.engine.task import Record, Task
from actmat.engine.tensor import record_of
from actmat.engine.writing import write_region
from actmat.planning.pools import pooled
from actmat.planning.regions import Region

__all__ = ["merge_pool"]


def merge_pool(
    variants: Sequence[Sequence[Task]], readers: Sequence[TensorReader], findings: Findings, *, inspect_only: bool
) -> list[list[Record]]:
    """Merge one pool for all variants; records per variant, per member.

    Args:
        variants: for each output, one task per member, in the order of their rows.
        readers: one per member, each with buffers of its own.
        findings: receives problems with the values.
        inspect_only: see `TensorMerge`.
    """
    began = time.perf_counter()
    items = [t.item for t in variants[0]]
    regions = [Region(0, i.numel, i.shape, i.layout) for i in items]
    base_raw = [r.read_base(p) for r, p in zip(readers, regions, strict=True)]
    rows = pooled(items)
    whole = Region(0, rows.numel, rows.shape, rows.layout)
    first, inputs = variants[0][0], readers[0].inputs
    again = first.method.reads_again(whole.shape, len(inputs.experts), first.call.options)
    members = [Deltas(r, p, b, times=2 if again else 1) for r, p, b in zip(readers, regions, base_raw, strict=True)]
    once = len(variants) == 1 and first.method.access.one_pass and not first.looks_again and first.observer is None
    once = once and not (again and inputs.are_costly)
    with readers[0].computing():
        deltas: Sequence[Tensor] = stacked(members) if once else list(stacked(members))
    flat = torch.cat([b.reshape(-1) for b in base_raw])
    reader = readers[0]
    around = Surroundings(
        reader.inputs.statistics,
        reader.compute_dtype,
        reader.device,
        base=lambda region: reader.converted_base(region, flat),
        stages={} if len(variants) > 1 else None,
    )
    for tasks in variants:
        leader = dataclasses.replace(tasks[0], item=pooled([t.item for t in tasks]), stats={}, observer=None)
        with reader.computing():
            merged = apply_method(leader, whole, deltas, around).view(whole.shape)
        if inspect_only or findings.fatal:
            continue
        row = 0
        for task, region, raw, read, own in zip(tasks, regions, base_raw, members, readers, strict=True):
            here = slice(row, row + region.shape[0])
            row = here.stop
            value = merged[here].reshape(-1)
            task.stats = {"pool": task.item.pool, **leader.stats}
            if task.observer is not None:
                task.observer.region(Merged(region, [d[here] for d in deltas], None, raw, value, _no_stage, {}))
            write_region(task, region, raw, value if read.changed else None, own)
    for member in members:
        member.release()
    if inspect_only or findings.fatal:
        return []
    share = (time.perf_counter() - began) / (len(variants) * len(items))
    return [
        [
            record_of(task, own, findings, share, changed=read.changed)
            for task, own, read in zip(tasks, readers, members, strict=True)
        ]
        for tasks in variants
    ]


def _no_stage(k: int) -> Any:
    """A pool's first stage belongs to no single member."""
    return None
