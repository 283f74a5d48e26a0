"""Kernel `dense`: a method on dense deltas, for all outputs that share the reading of one tensor.

Several outputs (methods, options, scopes) of one run share the reading, and those of one family share the first stage
of the computation. Each is given the regions that it would be given on its own, so that its bytes do not depend on the
other outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actmat.engine.calls import CallContext, apply_method, narrowed
from actmat.engine.deltas import RegionDeltas
from actmat.engine.kernels.factored import merged_by_factors
from actmat.engine.kernels.regions import BaseEntries, by_regions
from actmat.engine.observer import ObservedMerge
from actmat.engine.reader import TensorReader
from actmat.engine.task import Record, Task
from actmat.planning.regions import Region


def run(tasks: Sequence[Task], reader: TensorReader) -> list[Record]:
    """Merge one tensor for all tasks.

    Raises:
        NumericalError, RecipeError: from a method, with the name of the tensor.
    """
    return by_regions(tasks, reader, _merge)


def _merge(tasks: Sequence[Task], region: Region, base_raw: BaseEntries, reader: TensorReader) -> bool:
    """Merge a region that was read for all tasks; each gets the regions of its own in it."""
    assert reader.reading is not None, "the plan says how deltas are read"
    deltas = RegionDeltas(reader, region, base_raw, reader.reading.strategy)
    alike: dict[tuple[Region, ...], list[Task]] = {}
    for task in tasks:
        alike.setdefault(task.regions, []).append(task)
    for regions, group in alike.items():
        if len(alike) == 1:
            _merge_group(group, region, deltas, base_raw, reader, changed=None)
            continue
        for own in regions:
            given = [narrowed(d, own).view(own.shape) for d in deltas.held()]
            base = narrowed(base_raw, own) if isinstance(base_raw, Tensor) else base_raw
            _merge_group(group, own, given, base, reader, changed=any(bool(d.any()) for d in given))
    changed = deltas.changed or any(t.method.moves_base(t.call.options) for t in tasks)
    deltas.release()
    return changed


def _merge_group(
    group: Sequence[Task],
    region: Region,
    deltas: Sequence[Tensor],
    base_raw: BaseEntries,
    reader: TensorReader,
    *,
    changed: bool | None,
) -> None:
    """Merge and write a region for tasks with the same call; `changed` None: ask the deltas once they were read."""
    base, shares = None, len(group) > 1 or any(t.observer is not None for t in group)
    if any(t.method.uses_base(t.call.options) for t in group):
        assert isinstance(base_raw, Tensor), "a method that takes the base is given it whole"
        base = reader.converted_base(region, base_raw)
    context = CallContext(
        reader.inputs.statistics, reader.compute_dtype, reader.device, base, stages={} if shares else None
    )
    for task in group:
        factors = None
        if task.item.form == "factored":  # among others that take dense deltas
            factors, value = merged_by_factors(task, region, reader)
        else:
            value = apply_method(task, region, deltas, context)
        if task.observer is not None:
            assert isinstance(base_raw, Tensor), "an observer is given everything whole"
            stages = context.first_stages(task)
            task.observer.region(ObservedMerge(region, deltas, factors, base_raw, value, stages, task.stats))
        moved = deltas.changed if isinstance(deltas, RegionDeltas) else bool(changed)
        moved = moved or task.method.moves_base(task.call.options)
        task.output.take(region, base_raw, value if moved else None, reader)
