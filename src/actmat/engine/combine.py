"""Merge a tensor as a sum of its deltas: find the coefficients in one pass, add up and write in another.

For methods that declare `combine`. No delta, no result and no base is ever held as a whole, and the bits are those of
the method on deltas that are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actmat.engine.apply import checked_finite
from actmat.engine.naming import named_errors
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.engine.rows import RowDeltas
from actmat.engine.task import Task
from actmat.engine.writing import write_chunk, write_region
from actmat.linalg.inner import add_up, inner_products
from actmat.planning.regions import Region

__all__ = ["merge_combined"]


def merge_combined(task: Task, region: Region, base_raw: Tensor | StreamedBase, reader: TensorReader) -> bool:
    """Merge and write one region; whether anything changed.

    Raises:
        NumericalError, RecipeError: from the method, with the name of the tensor.
    """
    method, call = task.method, task.call
    assert method.combine is not None
    with_base = method.uses_base(call.options)
    basis = RowDeltas(reader, region, with_base=with_base)
    with named_errors(task.kind, task.item.name, call.method):
        gram_BB = inner_products(basis)
        if not bool(gram_BB.isfinite().all()):  # as rare as a broken checkpoint: find what is not, and clear it
            basis.clear()
            gram_BB = inner_products(basis)
        weights = {"weights": call.weights} if method.is_weighted else {}
        found = method.combine(gram_BB, **weights, **call.options)
        task.note(region.label, found.stats)
    norm_B = gram_BB.diagonal().sqrt()
    if not bool(norm_B[int(with_base) :].any()):
        write_region(task, region, base_raw, None, reader)
        return False
    # no entry of the sum is larger than this; where that may overflow, sums are checked
    largest = float(torch.tensor(found.coefficients, dtype=torch.float64).abs() @ norm_B)
    may_overflow = not largest < torch.finfo(reader.compute_dtype).max / 2
    for start, chunk in basis.chunks():
        # the deltas of a chunk are not needed again: the first takes the sum, unless the base is added before it
        sum_S = reader.scratch.total.take(chunk.base_S.numel(), reader.compute_dtype)
        sum_S = add_up(chunk.basis, found.coefficients, sum_S if with_base else chunk.deltas_TS[0])
        if may_overflow:
            with named_errors(task.kind, task.item.name, call.method):
                checked_finite(sum_S, task)
        if region.start + start + sum_S.numel() > task.merged_sample.wanted_from:
            task.merged_sample.add(region.start + start, sum_S, call.scale)
        if task.factors is not None:
            task.factors.add(region.start + start, sum_S, call.scale)
            continue
        write_chunk(task, torch.add(chunk.base_S, sum_S, alpha=call.scale, out=sum_S), chunk.stored_KS[0], reader)
    return True
