"""Kernel `factored`: a method on factors, of a module of adapters or of a tensor whose deltas are all products.

    D* = method(b_1 a_1, ..., b_T a_T) = b a

A tensor of a model is multiplied out once and added to the base. A module is cut or padded to the planned rank,
`A = a, B = scale * b, alpha = r`; a method without a form on factors is given the products.

Shapes: `O` out_features, `I` in_features, `R` rank, `E` stacked experts. The small matrices are float64, the factors
are rounded once, to the output dtype.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.engine.calls import (
    CallContext,
    apply_to_factors,
    finish_factors,
    merge_factors,
    named_errors,
    needs_of,
    stacked,
)
from actmat.engine.kernels.regions import BaseEntries, adapter_record, by_regions
from actmat.engine.observer import ObservedMerge
from actmat.engine.reader import AdapterReader, TensorReader
from actmat.engine.size import products_of
from actmat.engine.task import Record, Task, join_stats
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.lapack import retry_stats
from actmat.linalg.lowrank import LowRank, Truncated, frobenius_norm, truncate, weighted_sum
from actmat.planning.adapter.layouts import ALPHA
from actmat.planning.item import Item
from actmat.planning.regions import Region, cut, matrix_label


def run(tasks: Sequence[Task], reader: TensorReader | AdapterReader) -> list[Record]:
    """Merge one tensor, or one module, by its factors.

    Raises:
        NumericalError, RecipeError: from the method, with the name of the item.
    """
    if isinstance(reader, AdapterReader):
        return [_merge_module(task, reader) for task in tasks]
    return by_regions(tasks, reader, _merge_tensor)


def _merge_tensor(tasks: Sequence[Task], region: Region, base_raw: BaseEntries, reader: TensorReader) -> bool:
    """True: the plan lists tensors as factored only where an expert changes them."""
    for task in tasks:
        factors, value = merged_by_factors(task, region, reader)
        if task.observer is not None:
            assert isinstance(base_raw, Tensor), "an observer is given everything whole"
            task.observer.region(ObservedMerge(region, (), factors, base_raw, value, {}, task.stats))
        task.output.take(region, base_raw, value, reader)
    return True


def merged_by_factors(task: Task, region: Region, reader: TensorReader) -> tuple[Sequence[Sequence[LowRank]], Tensor]:
    """Factors of every expert per logical matrix of a region, and the merged delta, flat."""
    factors = reader.factors(region)
    return factors, apply_to_factors(task, region, factors, CallContext(reader.inputs.statistics, torch.float64))


def _merge_module(task: Task, reader: AdapterReader) -> Record:
    """Merge and write the factors of one module."""
    began = time.perf_counter()
    item = task.item
    deltas = reader.factors(item)
    with named_errors(task):
        dtype = torch.float64 if item.form == "factored" else reader.compute_dtype
        values = _merge_blocks(task, deltas, CallContext(reader.inputs.statistics, dtype))
    merged = _packed(item, values)
    truncated = truncate(LowRank(merged.b_OR * task.call.scale, merged.a_RI), item.pair.rank)
    task.stats = join_stats(task.stats, _norms(deltas, truncated))
    out = list(_stored(item, truncated.value))
    for spec in item.outputs[len(out) :]:
        is_scale = spec.name.endswith(ALPHA)
        out.append(torch.tensor(float(item.pair.rank), dtype=torch.float64) if is_scale else _bias(task, reader))
    return adapter_record(task, out, began, products_of(deltas))


def module_deltas(item: Item, reader: AdapterReader) -> Iterator[list[Any]]:
    """Per logical matrix of a module, the deltas in the form that its method takes (for surveys)."""
    for _, factors in _by_block(item, reader.factors(item)):
        yield factors if item.form == "factored" else [f.dense().to(reader.compute_dtype) for f in factors]


def _by_block(item: Item, deltas: Sequence[LowRank]) -> Iterator[tuple[str, list[LowRank]]]:
    """Packed maps one by one, with their labels: their rows are rows of `b`."""
    if not item.pair.blocks:
        yield "", list(deltas)
        return
    layout = TensorLayout(Role.FUSED_LINEAR, "", blocks=item.pair.blocks)
    split = [layout.to_matrices(d.b_OR) for d in deltas]
    for k, block in enumerate(item.pair.blocks):
        yield block.name, [LowRank(s[k], d.a_RI) for s, d in zip(split, deltas, strict=True)]


def _logical(item: Item) -> Region:
    """The module as one region whose logical matrices are its blocks."""
    role = Role.FUSED_LINEAR if item.pair.blocks else item.layout.role
    role = Role.LINEAR if role in (Role.CONVOLUTION, Role.STACKED_EXPERTS) else role
    return Region(0, item.numel, item.shape, TensorLayout(role, item.layout.reason, blocks=item.pair.blocks))


def _merge_blocks(task: Task, deltas: Sequence[LowRank], context: CallContext) -> list[LowRank]:
    """Merged delta of every block, after steps and caps."""
    region, by_matrix = _logical(task.item), task.item.form == "factored" or task.method.acts_on == "matrix"
    whole = None if by_matrix else _merge_stored(task, deltas, context)
    values = []
    for k, (label, own) in enumerate(_by_block(task.item, deltas)):
        if whole is None:
            values.append(_merge_block(task, region, k, own, context))
        else:
            value = _as_factors(region.layout.to_matrices(whole)[k])
            values.append(finish_factors(task, value, own, label))
        _observe(task, label, own, values[-1])
    return values


def _merge_block(task: Task, region: Region, k: int, deltas: Sequence[LowRank], context: CallContext) -> LowRank:
    """Merged delta of one block; random methods and spaces take a stack matrix by matrix, as in a model."""
    if deltas[0].b_OR.ndim == 3 and (task.method.is_random or task.call.space != "full"):
        found = []
        for e in range(deltas[0].b_OR.shape[0]):
            own = [LowRank(d.b_OR[e], d.a_RI[e]) for d in deltas]
            found.append(_merge_block(task, dataclasses.replace(region, label=str(e)), k, own, context))
        return stacked(found)
    if task.item.form == "factored":
        return merge_factors(task, region, k, deltas, context)
    label = matrix_label(region, k)
    dense = [d.dense().to(context.dtype) for d in deltas]
    merged = task.method.merge(dense, **needs_of(task, region, k, label, context), **task.call.options)
    task.note(label, merged.stats)
    return finish_factors(task, _as_factors(merged.value), deltas, label)


def _merge_stored(task: Task, deltas: Sequence[LowRank], context: CallContext) -> Tensor:
    """The merged delta of an elementwise method.

    It is given the tensor as a model stores it, in the regions of a merge into a model, so that random methods draw the
    same masks for both.
    """
    item = task.item
    turned = item.pair.transposed
    dense = [d.dense().to(context.dtype) for d in deltas]
    flat = [(d.mT if turned else d).reshape(-1) for d in dense]
    out = torch.empty_like(flat[0])
    for region in cut(item.pair.shape, item.layout, task.method.acts_on):
        own = [f[region.start : region.stop].view(region.shape) for f in flat]
        merged = task.method.merge(own, **needs_of(task, region, 0, region.label, context), **task.call.options)
        if task.method.acts_on == "tensor":
            task.note(region.label, merged.stats)
        out[region.start : region.stop] = merged.value.reshape(-1)
    return out.view(dense[0].mT.shape).mT if turned else out.view(item.shape)


def _observe(task: Task, label: str, deltas: Sequence[LowRank], value: LowRank) -> None:
    if task.observer is not None:
        shape = tuple(value.shape)
        region = Region(0, math.prod(shape), shape, TensorLayout(Role.LINEAR, ""), label)
        task.observer.region(ObservedMerge(region, (), [deltas], None, value, {}, task.stats))


def _packed(item: Item, regions: Sequence[LowRank]) -> LowRank:
    """`[b_1 a_1; b_2 a_2; ...]` with block-diagonal `b`, in the order in which the rows are stored."""
    if not item.pair.blocks:
        return regions[0]
    total = sum(p.rank for p in regions)
    wide, start = [], 0
    for region in regions:
        wide.append(torch.nn.functional.pad(region.b_OR, (start, total - start - region.rank)))
        start += region.rank
    layout = TensorLayout(Role.FUSED_LINEAR, "", blocks=item.pair.blocks)
    shape = (*item.shape[:-1], total)
    return LowRank(layout.from_matrices(wide, shape), torch.cat([p.a_RI for p in regions], dim=-2))


def _as_factors(delta_OI: Tensor) -> LowRank:
    """The delta times an identity, float64."""
    delta_OI = delta_OI.to(torch.float64)
    rows, columns = delta_OI.shape[-2:]
    one = torch.eye(min(rows, columns), dtype=delta_OI.dtype).expand(*delta_OI.shape[:-2], -1, -1)
    return LowRank(delta_OI, one) if columns <= rows else LowRank(one, delta_OI)


def _stored(item: Item, value: LowRank) -> tuple[Tensor, Tensor]:
    """A and B as PEFT stores them, see `experts.lora.modules`."""
    if item.pair.kind == "embedding":
        return value.b_OR.mT, value.a_RI.mT
    if item.pair.kind == "convolution":
        ones = (1,) * (len(item.pair.kernel) - 1)
        return value.a_RI.reshape(-1, *item.pair.kernel), value.b_OR.reshape(*value.b_OR.shape, *ones)
    if item.pair.turned:
        value = LowRank(value.a_RI.mT, value.b_OR.mT)
    if len(item.shape) == 3:
        return value.a_RI.flatten(0, 1), value.b_OR.permute(1, 2, 0).flatten(1)
    return value.a_RI, value.b_OR


def _norms(deltas: Sequence[LowRank], truncated: Truncated) -> dict[str, Any]:
    """Norms of the inputs, of their sum and of the result, and the error of the truncation."""
    total = weighted_sum(deltas, [1.0] * len(deltas))
    return {
        "norm": truncated.norm,
        "expert_norms": [frobenius_norm(d) for d in deltas],
        "sum_norm": frobenius_norm(total),
        "numerical_rank": truncated.rank,
        "error_norm": truncated.error,
        "relative_error": truncated.error / truncated.norm if truncated.norm else 0.0,
        **retry_stats(truncated.retries),
    }


def _bias(task: Task, reader: AdapterReader) -> Tensor:
    """Sum of the experts' additions to the layer's bias, or their mean over the experts that have one."""
    total, share = torch.zeros(task.item.shape[-2], dtype=torch.float64), 0.0
    found, call = reader.biases(task.item), task.item.pair.bias
    assert call is not None, "planned for every module with a bias"
    weights = call.weights or (1.0,) * len(found)
    for delta, weight in zip(found, weights, strict=True):
        if delta is not None:
            total.add_(delta, alpha=weight)
            share += weight
    if call.method != "average":
        return total.mul_(call.scale * call.options.get("scaling", 1.0))
    return total / share if share else total
