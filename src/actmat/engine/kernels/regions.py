"""One tensor with its base, region by region: read, merge, write, record. The kernels say how a region is merged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from actmat.checkpoints.hashing import hash_names
from actmat.engine.deltas import RegionDeltas
from actmat.engine.memory import Room
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.engine.size import products_of, size_of
from actmat.engine.task import Record, Task
from actmat.engine.writing import write_tensor
from actmat.planning.item import Reading
from actmat.planning.regions import CHUNK, Region

BaseEntries = Tensor | StreamedBase
"""Entries of the base on a region as stored, flat, held or read chunk by chunk."""

MergeRegion = Callable[[Sequence[Task], Region, BaseEntries, TensorReader], bool]
"""Merge a region for the tasks that have a method and give the result to their outputs; True if anything changed."""


def by_regions(tasks: Sequence[Task], reader: TensorReader, merge: MergeRegion | None) -> list[Record]:
    """Merge one tensor; records in the order of the tasks, none if the inputs cannot be merged.

    Args:
        tasks: one per output, merges and copies alike.
        reader: reads the tensor.
        merge: merges a region; None if the base is only copied.
    """
    began = time.perf_counter()
    copied, merging = ([t for t in tasks if t.merges == merges] for merges in (False, True))
    changed = False
    room = _room_bytes(merging, reader)
    with reader.scratch.room.opened(room, elsewhere=max(0, reader.planned_bytes - room)):
        for region in reader.regions:
            base_raw = reader.base_of(region)
            for task in copied:
                task.output.take(region, base_raw, None, reader)
            if merge is not None and not reader.is_futile:
                changed |= merge(merging, region, base_raw, reader)
            elif merging and reader.reading is not None:
                deltas = RegionDeltas(reader, region, base_raw)  # results are discarded; this finds bad values
                for _ in deltas if isinstance(base_raw, Tensor) else deltas.walk():
                    pass
    if reader.is_futile:
        return []
    share = (time.perf_counter() - began) / len(tasks)
    return [record_of(task, reader, share, changed=changed) for task in tasks]


def _room_bytes(merging: Sequence[Task], reader: TensorReader) -> int:
    """Bytes of the buffers as large as a region: the base as stored and as a method needs it, a result, deltas."""
    reading = reader.reading or Reading("each")
    passing = reading.strategy in ("each", "combine")  # deltas have memory of their own, or none
    whole = 0 if passing else reading.whole_deltas(reader.n_experts) + 1
    whole += reading.strategy != "combine" and any(t.method.uses_base(t.call.options) for t in merging)
    whole *= reader.on_host
    largest = max((region.numel for region in reader.regions if region.numel > CHUNK and merging), default=0)
    base = [(reader.base_dtype.itemsize, largest)] * reading.base_held
    return Room.bytes_for(*base, *[(reader.compute_dtype.itemsize, largest)] * whole)


def record_of(task: Task, reader: TensorReader, seconds: float, *, changed: bool) -> Record:
    """The record of a task whose regions were all given to its output.

    Raises:
        NumericalError: from the output.
    """
    began = time.perf_counter()
    hashes = task.output.finish()
    base_hash, expert_hashes = reader.hashes()
    size, products = None, tuple[float, ...]()
    if task.item.action == "merge" and reader.sample is not None:
        reader.sample.finish()
        size = size_of(task.item, reader.sample, task.output.sample.entries)
        products = products_of(reader.sample.probes)
    return Record(
        name=task.item.name,
        hash=task.output.digest,
        hashes=hashes,
        base_hash=base_hash,
        expert_hashes=expert_hashes if task.merges else (),
        stats={**task.stats, **task.output.stats},
        unchanged=not (task.merges and changed),
        nonfinite=reader.findings.count(task.item.name) if task.merges else 0,
        seconds=seconds + time.perf_counter() - began,
        observed=task.observer.finish() if task.observer is not None else None,
        size=size,
        products=products,
    )


def adapter_record(task: Task, values: Sequence[Tensor], began: float, products: tuple[float, ...] = ()) -> Record:
    """Write the outputs of an item that has no base, each rounded once; its record.

    Raises:
        NumericalError: values that the output dtype does not hold.
    """
    outputs = zip(task.item.outputs, values, strict=True)
    hashes = {spec.name: write_tensor(task.writer, spec, value) for spec, value in outputs}
    return Record(
        name=task.item.name,
        hash=hash_names(hashes.items()),
        hashes=hashes,
        stats=task.stats,
        unchanged=task.item.factors is not None and not any(task.stats["expert_norms"]),
        seconds=time.perf_counter() - began,
        observed=task.observer.finish() if task.observer is not None else None,
        products=products,
    )
