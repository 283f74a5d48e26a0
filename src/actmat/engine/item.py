"""The one loop: merge an item for all outputs that share its reading, region by region; read, merge, write, record.

Several outputs (methods, options, scopes) of one run share the reading, and those of one family share the first stage
of the computation. Each is given the regions that it would be given on its own, so that its bytes do not depend on the
other outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

import torch

from actmat.checkpoints.hashing import hash_names
from actmat.engine.deltas import RegionDeltas, RowDeltas
from actmat.engine.memory import Room
from actmat.engine.method import checked_finite, merge_region, named_errors
from actmat.engine.observer import ObservedMerge
from actmat.engine.reader import BaseEntries, ItemReader
from actmat.engine.record import Record
from actmat.engine.sinks import Sink, sink_of, write_tensors
from actmat.engine.size import products_of, size_of
from actmat.engine.task import Task, join_stats
from actmat.linalg.inner import add_up
from actmat.planning.item import Reading
from actmat.planning.regions import CHUNK, Region


def merge_item(tasks: Sequence[Task], reader: ItemReader) -> list[Record]:
    """Merge one item; records in the order of the tasks, none if the inputs cannot be merged.

    Args:
        tasks: one per output, merges and copies alike.
        reader: reads the item.

    Raises:
        NumericalError, RecipeError: from a method, with the name of the item.
    """
    if reader.item.write.kind == "mean":
        return [_write_mean(task, reader) for task in tasks]
    began, changed = time.perf_counter(), False
    sinks = [sink_of(task, reader) for task in tasks]
    copied = [sink for sink in sinks if not sink.task.merges]
    merging = [sink for sink in sinks if sink.task.merges]
    with _buffers_of(merging, reader):
        for region in reader.regions:
            base = reader.base_of(region)
            for sink in copied:
                sink.take(region, base, None, None)
            if not merging:
                continue
            assert reader.reading is not None, "the plan says how deltas are read"
            if reader.results_discarded:
                RegionDeltas(reader, region, base).drain()  # results are discarded; the rest is read for bad values
            elif reader.reading.strategy == "combine":
                changed |= _combine(merging[0], region, base, reader)
            else:
                changed |= _merge(merging, RegionDeltas(reader, region, base, reader.reading.strategy))
    if reader.results_discarded:
        return []
    share = (time.perf_counter() - began) / len(tasks)
    return [_record_of(sink, reader, share, changed=changed) for sink in sinks]


@contextlib.contextmanager
def _buffers_of(merging: Sequence[Sink], reader: ItemReader) -> Iterator[None]:
    """Memory for buffers as large as a region: the base as stored and as a method needs it, a result, deltas."""
    reading = reader.reading or Reading("each")
    passing = reading.strategy in ("each", "combine")  # deltas have memory of their own, or none
    whole = 0 if passing else reading.whole_deltas(reader.n_experts) + 1
    whole += reading.strategy != "combine" and any(s.task.method.uses_base(s.task.call.options) for s in merging)
    whole *= reader.on_host
    has_base = reader.item.has_base and bool(merging)
    largest = max((region.numel for region in reader.regions if region.numel > CHUNK and has_base), default=0)
    base = [(reader.base_dtype.itemsize, largest)] * reading.base_held
    room = Room.bytes_for(*base, *[(reader.compute_dtype.itemsize, largest)] * whole)
    with reader.scratch.room.opened(room, elsewhere=max(0, reader.planned_bytes - room)):
        yield


def _merge(merging: Sequence[Sink], deltas: RegionDeltas) -> bool:
    """Merge a region that was read for all tasks, each with regions of its own; True if anything changed."""
    alike: dict[tuple[Region, ...], list[Sink]] = {}
    for sink in merging:
        alike.setdefault(sink.task.regions, []).append(sink)
    for regions, group in alike.items():
        if len(alike) == 1:
            _merge_group(group, deltas)
            continue
        for region in regions:
            _merge_group(group, deltas.narrowed(region))
    changed = deltas.changed or any(_moves_base(sink.task) for sink in merging)
    deltas.release()
    return changed


def _merge_group(group: Sequence[Sink], deltas: RegionDeltas) -> None:
    """Merge and write a region for tasks that are called on the same regions."""
    if len(group) > 1:
        deltas.stages = {}
    for sink in group:
        task = sink.task
        value = merge_region(task, deltas)
        if task.observer is not None and not task.item.is_module:
            task.observer.region(_observed(task, deltas, value))
        sink.take(deltas.region, deltas.base_raw, value if deltas.changed or _moves_base(task) else None, deltas)


def _moves_base(task: Task) -> bool:
    return task.method.moves_base(task.call.options)


def _observed(task: Task, deltas: RegionDeltas, value: object) -> ObservedMerge:
    """A merged region of a tensor, for its observer."""
    assert isinstance(value, torch.Tensor), "the delta of a tensor is dense"
    assert isinstance(deltas.base_raw, torch.Tensor), "an observer is given everything whole"
    if task.item.is_factored:
        return ObservedMerge(deltas.region, (), deltas.factors, deltas.base_raw, value)
    return ObservedMerge(deltas.region, deltas, None, deltas.base_raw, value)


def _combine(sink: Sink, region: Region, base: BaseEntries | None, reader: ItemReader) -> bool:
    """Merge a region as a sum whose coefficients are found in one pass, added up and written in another.

    For methods that declare `combine`, alone with their item. No delta, result or base is ever held as a whole, and the
    bits are those of the method on complete deltas. It takes 0.62 to 0.64 of the processor time of streaming the
    deltas twice (slerp, karcher and model_stock of three matrices 4096 x 4096 in bfloat16, 2026-11-26).
    """
    task = sink.task
    method, call = task.method, task.call
    assert method.combine is not None, "the plan chose it"
    with_base = method.uses_base(call.options)
    rows = RowDeltas(reader, region, with_base=with_base)
    with named_errors(task):
        gram_BB = rows.inner_products()
        if not bool(gram_BB.isfinite().all()):  # as rare as a broken checkpoint: find such entries, and clear them
            rows.clear()
            gram_BB = rows.inner_products()
        weights = {"weights": call.weights} if method.is_weighted else {}
        combination = method.combine(gram_BB, **weights, **call.options)
        task.note(region.label, combination.stats)
    norm_B = gram_BB.diagonal().sqrt()
    if not bool(norm_B[int(with_base) :].any()):
        sink.take(region, base, None, None)
        return False
    # no entry of the sum is larger than this; if that may overflow, sums are checked
    largest = float(torch.tensor(combination.coefficients, dtype=torch.float64).abs() @ norm_B)
    may_overflow = not largest < torch.finfo(reader.compute_dtype).max / 2
    for start in rows.chunks():
        # the deltas of a chunk are not needed again: the first takes the sum, unless the base is added before it
        sum_S = reader.scratch.take("total", rows.base_S.numel(), reader.compute_dtype)
        sum_S = add_up(rows.basis, combination.coefficients, sum_S if with_base else rows.deltas_TS[0])
        if may_overflow:
            with named_errors(task):
                checked_finite(sum_S, task)
        sink.take_chunk(region.start + start, sum_S, rows.base_S, rows.stored_KS[0])
    return True


def _record_of(sink: Sink, reader: ItemReader, seconds: float, *, changed: bool) -> Record:
    """The record of a sink to which all regions were given.

    Raises:
        NumericalError: from the sink.
    """
    began, task = time.perf_counter(), sink.task
    record = sink.finish()
    base_hash, expert_hashes = reader.hashes()
    size, products = None, record.products
    if task.item.action == "merge" and reader.sample is not None:
        reader.sample.finish()
        size = size_of(task.item, reader.sample, sink.sample.entries)
        probes = reader.sample.probes
        products = products_of(torch.stack(probes) @ torch.stack(probes).mT) if probes else ()
    return dataclasses.replace(
        record,
        base_hash=base_hash,
        expert_hashes=expert_hashes if task.merges else (),
        stats=join_stats(task.stats, record.stats),
        unchanged=record.unchanged or not (task.merges and changed),
        seconds=seconds + time.perf_counter() - began,
        observed=task.observer.finish() if task.observer is not None else None,
        size=size,
        products=products,
    )


def _write_mean(task: Task, reader: ItemReader) -> Record:
    """Write the mean of a tensor that adapters trained in full, over those that have it."""
    began, item = time.perf_counter(), task.item
    weights = task.call.weights or (1.0,) * len(item.sources)
    rows = zip(reader.inputs.experts, item.sources, weights, strict=True)
    having = [(expert, source, weight) for expert, source, weight in rows if source is not None]
    share = math.fsum(weight for _, _, weight in having)
    total = torch.zeros(item.shape, dtype=torch.float64)
    for expert, source, weight in having:
        total.add_(expert.read(source.name).to(torch.float64), alpha=weight / share)
    hashes = write_tensors(task.writer, item.outputs, [total])
    seconds = time.perf_counter() - began
    return Record(item.name, hash_names(hashes.items()), hashes, stats=task.stats, seconds=seconds)
