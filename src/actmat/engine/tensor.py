"""Merge one tensor for all variants: read, apply each method, add to the base, cast, write.

Several variants (methods, options, scopes) of one merge share the reading, and those of one family share the first
stage of the computation. Each is given the regions that it would be given on its own, so that its bytes do not depend
on the other variants.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.hashing import hash_names
from actmat.engine.after import narrowed
from actmat.engine.apply import apply_method, apply_to_factors, stage_key
from actmat.engine.combine import merge_combined
from actmat.engine.deltas import Deltas
from actmat.engine.findings import Findings
from actmat.engine.memory import Room
from actmat.engine.needs import Surroundings
from actmat.engine.observer import Merged
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.engine.size import size_of
from actmat.engine.task import Record, Task
from actmat.engine.writing import write_region
from actmat.planning.model import Item
from actmat.planning.reading import Access, Reading, reading_of
from actmat.planning.regions import CHUNK, Region, cut

__all__ = ["TensorMerge", "record_of", "surroundings_of"]


def surroundings_of(
    reader: TensorReader, base_raw: Tensor | StreamedBase, *, keeps_stages: bool = False
) -> Surroundings:
    """Everything that methods may need of a region besides its deltas; see `Surroundings.stages`."""

    def base(region: Region) -> Tensor:
        assert isinstance(base_raw, Tensor), "a method that takes the base is given it whole"
        return reader.converted_base(region, base_raw)

    stages: dict[Any, Any] | None = {} if keeps_stages else None
    return Surroundings(reader.inputs.statistics, reader.compute_dtype, reader.device, base, stages)


@dataclass
class TensorMerge:
    """One tensor and the tasks that want it, merges and copies alike.

    Args:
        tasks: one per variant.
        reader: reads the tensor.
        findings: receives problems with its values.
        inspect_only: nothing of this run will be kept; values are read to find all problems.
    """

    tasks: Sequence[Task]
    reader: TensorReader
    findings: Findings
    inspect_only: bool = False

    def __post_init__(self) -> None:
        self._merging = [t for t in self.tasks if t.merges]
        self._by_regions: dict[tuple[Region, ...], list[Task]] = {}
        for task in self._merging:
            self._by_regions.setdefault(task.regions, []).append(task)
        self._changed = False

    def run(self) -> list[Record]:
        """Records in the order of the tasks; none where the inputs cannot be merged."""
        began = time.perf_counter()
        for region in self.regions():
            how = self._reading(region)
            base_raw: Tensor | StreamedBase = (
                self.reader.read_base(region) if how.base_held else StreamedBase(self.reader, region)
            )
            for task in self.tasks:
                if not task.merges:
                    write_region(task, region, base_raw, None, self.reader)
            if self._merging:
                self._merge(region, base_raw, how)
        if self._is_futile:
            return []
        share = (time.perf_counter() - began) / len(self.tasks)
        return [record_of(t, self.reader, self.findings, share, changed=self._changed) for t in self.tasks]

    def room_bytes(self) -> int:
        """Bytes of the buffers as large as a region: the base as stored and as a method wants it, a result, deltas."""
        width, base_width = self.reader.compute_dtype.itemsize, torch_dtype(self.tasks[0].item.base_dtype).itemsize
        largest = 0
        for region in self.regions():
            if region.numel <= CHUNK or not self._merging:
                continue
            how = self._reading(region)
            passing = how.strategy in ("each", "combine")  # deltas have memory of their own, or none
            whole = 0 if passing else how.whole_deltas(self.reader.n_experts) + 1
            whole += how.strategy != "combine" and any(t.method.uses_base(t.call.options) for t in self._merging)
            whole *= self.reader.on_host
            bases = [(base_width, region.numel)] if how.base_held else []
            largest = max(largest, Room.bytes_for(*bases, *[(width, region.numel)] * whole))
        return largest

    @property
    def _is_futile(self) -> bool:
        return self.inspect_only or self.findings.fatal

    def regions(self) -> Sequence[Region]:
        """The regions that all variants want, the whole tensor where they differ, chunks where it is only copied."""
        item: Item = self.tasks[0].item
        wanted = list(self._by_regions)
        if not wanted:
            return cut(item.shape, item.layout, "elementwise")
        return wanted[0] if len(wanted) == 1 else [Region(0, item.numel, item.shape, item.layout)]

    def _reading(self, region: Region) -> Reading:
        """The cheapest reading that serves all variants; a method on its own may be given less than all at a time."""
        if len(self._merging) != 1:
            return Reading("held")
        (task,) = self._merging
        if task.item.form == "factored":  # no dense delta is formed
            return Reading("each")
        access = Access(
            chunkable=self.reader.chunkable,
            costly=self.reader.inputs.are_costly,
            observed=task.looks_again or task.observer is not None,
            copied=len(self.tasks) > 1,
        )
        width = self.reader.compute_dtype.itemsize
        return reading_of(task.method, task.call.options, region, self.reader.n_experts, width, access)

    def _merge(self, region: Region, base_raw: Tensor | StreamedBase, how: Reading) -> None:
        if how.strategy == "combine" and not self._is_futile:
            self._changed |= merge_combined(self._merging[0], region, base_raw, self.reader)
            return
        lazily = self._is_futile or how.strategy == "combine"
        deltas = Deltas(self.reader, region, base_raw, "each" if lazily else how.strategy, how.times)
        if self._is_futile:  # read on to find the other bad values
            for _ in deltas if how.base_held else deltas.walk():
                pass
            return
        if len(self._merging) == 1 and self._merging[0].item.form == "factored":
            deltas.changed = True  # no dense delta is formed, and the plan lists changed tensors only
        for regions, group in self._by_regions.items():
            for own in regions if len(self._by_regions) > 1 else (region,):
                self._merge_group(group, own, region, deltas, base_raw)
        self._changed |= deltas.changed or any(t.method.moves_base(t.call.options) for t in self._merging)
        deltas.release()

    def _merge_group(
        self, group: Sequence[Task], own: Region, read: Region, deltas: Deltas, base_raw: Tensor | StreamedBase
    ) -> None:
        """Merge and write the region `own` of what was read, for all tasks that want it."""
        given: Sequence[Tensor] = deltas
        narrow = own is not read
        if narrow:
            given = [narrowed(d, own).view(own.shape) for d in deltas.held()]
            base_raw = narrowed(base_raw, own) if isinstance(base_raw, Tensor) else base_raw
        keeps = len(group) > 1 or any(t.observer is not None for t in group)
        around = surroundings_of(self.reader, base_raw, keeps_stages=keeps)
        for task in group:
            factors = self.reader.factors(own) if task.item.form == "factored" else None
            if factors is None:
                with self.reader.computing():
                    value = apply_method(task, own, given, around)
            else:
                exact = Surroundings(around.statistics, torch.float64)
                value = apply_to_factors(task, own, factors, exact)
            if task.observer is not None:
                assert isinstance(base_raw, Tensor), "an observer is given everything whole"
                shown = () if factors is not None and deltas.is_lazy else given

                def stage(k: int, task: Task = task) -> object:
                    return (around.stages or {}).get(stage_key(task, k)) if task.method.stages is not None else None

                task.observer.region(Merged(own, shown, factors, base_raw, value, stage, task.stats))
            changed = any(bool(d.any()) for d in given) if narrow else deltas.changed
            changed = changed or task.method.moves_base(task.call.options)
            write_region(task, own, base_raw, value if changed else None, self.reader)


def record_of(task: Task, reader: TensorReader, findings: Findings, seconds: float, *, changed: bool) -> Record:
    """The record of a task whose bytes are all written."""
    began = time.perf_counter()
    if task.factors is not None:
        task.factors.finish()
    base_hash, expert_hashes = reader.hashes()
    digest = hash_names(task.hashes.items()) if task.factors is not None else task.sink.digest
    size = None
    if task.item.action == "merge" and reader.sample is not None:
        reader.sample.finish()
        size = size_of(task.item, reader.sample, task.merged_sample.entries)
    return Record(
        name=task.item.name,
        hash=digest,
        hashes=task.hashes,
        base_hash=base_hash,
        expert_hashes=expert_hashes if task.merges else (),
        stats=task.written_stats,
        unchanged=not (task.merges and changed),
        nonfinite=findings.count(task.item.name) if task.merges else 0,
        seconds=seconds + time.perf_counter() - began,
        observed=task.observer.finish() if task.observer is not None else None,
        size=size,
    )
