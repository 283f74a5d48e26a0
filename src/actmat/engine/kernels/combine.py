"""Kernel `combine`: a sum of deltas whose coefficients are found in one pass, added up and written in another.

For methods that declare `combine`. No delta, result or base is ever held as a whole, and the bits are those of the
method on complete deltas. It takes 0.62 to 0.64 of the processor time of streaming the deltas twice (slerp, karcher
and model_stock of three matrices 4096 x 4096 in bfloat16, 2026-11-26). Of adapters without a base, tensors that were
trained in full are combined themselves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from actmat.engine.calls import checked_finite, named_errors
from actmat.engine.deltas import RowDeltas
from actmat.engine.kernels.regions import BaseEntries, adapter_record, by_regions
from actmat.engine.reader import AdapterReader, TensorReader
from actmat.engine.task import Record, Task
from actmat.linalg.inner import add_up, inner_products
from actmat.planning.regions import Region


def run(tasks: Sequence[Task], reader: TensorReader | AdapterReader) -> list[Record]:
    """Combine one tensor.

    Raises:
        NumericalError, RecipeError: from the method, with the name of the tensor.
    """
    if isinstance(reader, AdapterReader):
        return [_mean(task, reader) for task in tasks]
    return by_regions(tasks, reader, _combine)


def _combine(tasks: Sequence[Task], region: Region, base_raw: BaseEntries, reader: TensorReader) -> bool:
    (task,) = tasks
    method, call = task.method, task.call
    assert method.combine is not None, "the plan chose it"
    with_base = method.uses_base(call.options)
    basis = RowDeltas(reader, region, with_base=with_base)
    with named_errors(task):
        gram_BB = inner_products(basis)
        if not bool(gram_BB.isfinite().all()):  # as rare as a broken checkpoint: find such entries, and clear them
            basis.clear()
            gram_BB = inner_products(basis)
        weights = {"weights": call.weights} if method.is_weighted else {}
        found = method.combine(gram_BB, **weights, **call.options)
        task.note(region.label, found.stats)
    norm_B = gram_BB.diagonal().sqrt()
    if not bool(norm_B[int(with_base) :].any()):
        task.output.take(region, base_raw, None, reader)
        return False
    # no entry of the sum is larger than this; if that may overflow, sums are checked
    largest = float(torch.tensor(found.coefficients, dtype=torch.float64).abs() @ norm_B)
    may_overflow = not largest < torch.finfo(reader.compute_dtype).max / 2
    for start, chunk in basis.chunks():
        # the deltas of a chunk are not needed again: the first takes the sum, unless the base is added before it
        sum_S = reader.scratch.total.take(chunk.base_S.numel(), reader.compute_dtype)
        sum_S = add_up(chunk.basis, found.coefficients, sum_S if with_base else chunk.deltas_TS[0])
        if may_overflow:
            with named_errors(task):
                checked_finite(sum_S, task)
        task.output.take_chunk(region.start + start, sum_S, chunk.base_S, chunk.stored_KS[0], reader)
    return True


def _mean(task: Task, reader: AdapterReader) -> Record:
    """The mean of a tensor that adapters trained in full, over those that have it."""
    began = time.perf_counter()
    item = task.item
    weights = task.call.weights or (1.0,) * len(item.sources)
    found = [(e, s, w) for e, s, w in zip(reader.inputs.experts, item.sources, weights, strict=True) if s is not None]
    share = math.fsum(w for _, _, w in found)
    total = torch.zeros(item.shape, dtype=torch.float64)
    for expert, source, weight in found:
        total.add_(expert.read(source.name).to(torch.float64), alpha=weight / share)
    return adapter_record(task, [total], began)
