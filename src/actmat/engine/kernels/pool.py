"""Kernel `pool`: several tensors that read the same input, merged as one matrix.

Their deltas are stacked along `O`, merged once and split again; reading, hashing, adding to the base and writing are
done per tensor.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from actmat.engine.calls import apply_method
from actmat.engine.deltas import Deltas, stacked
from actmat.engine.kernels.regions import context_of, record_of
from actmat.engine.observer import ObservedMerge
from actmat.engine.reader import PoolReader
from actmat.engine.task import Record, Task
from actmat.planning.pools import pooled
from actmat.planning.regions import Region


def run(tasks: Sequence[Task], reader: PoolReader) -> list[Record]:
    """Merge one pool for all outputs; tasks are those of the first tensor, then those of the next.

    Raises:
        NumericalError, RecipeError: from the method, with the name of the first tensor.
    """
    began = time.perf_counter()
    n_outputs = len(tasks) // len(reader.members)
    outputs = [tasks[k::n_outputs] for k in range(n_outputs)]
    assert reader.reading is not None, "the plan says how deltas are read"
    regions = [member.regions[0] for member in reader.members]
    base_raw = [m.read_base(r) for m, r in zip(reader.members, regions, strict=True)]
    read = zip(reader.members, regions, base_raw, strict=True)
    members = [Deltas(m, r, b) for m, r, b in read]
    leader = reader.members[0]
    deltas: Sequence[Tensor] = stacked(members)
    deltas = deltas if reader.reading.strategy == "each" else list(deltas)
    whole = pooled([t.item for t in outputs[0]])
    matrix = Region(0, whole.numel, whole.shape, whole.layout)
    flat = torch.cat([b.reshape(-1) for b in base_raw])
    context = context_of([of[0] for of in outputs], matrix, flat, leader, keeps_stages=n_outputs > 1)
    for of in outputs:
        first = dataclasses.replace(of[0], item=pooled([t.item for t in of]), stats={}, observer=None)
        merged = apply_method(first, matrix, deltas, context).view(whole.shape)
        if reader.is_futile:
            continue
        row = 0
        for task, region, raw, own, member in zip(of, regions, base_raw, members, reader.members, strict=True):
            here = slice(row, row + region.shape[0])
            row = here.stop
            value = merged[here].reshape(-1)
            task.stats = {"pool": task.item.pool, **first.stats}
            if task.observer is not None:
                task.observer.region(ObservedMerge(region, [d[here] for d in deltas], None, raw, value, {}, {}))
            task.output.take(region, raw, value if own.changed else None, member)
    for own in members:
        own.release()
    if reader.is_futile:
        return []
    share = (time.perf_counter() - began) / len(tasks)
    changed = [own.changed for own in members for _ in range(n_outputs)]
    each = [member for member in reader.members for _ in range(n_outputs)]
    return [record_of(t, m, share, changed=c) for t, m, c in zip(tasks, each, changed, strict=True)]
