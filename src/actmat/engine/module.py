"""Merge one module of adapters in the space of its factors, or a tensor that adapters trained in full.

    D* = method(b_1 a_1, ..., b_T a_T) = b a,   cut or padded to the planned rank,   A = a, B = scale * b, alpha = r

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

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.hashing import hash_names
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.after import finish_factors, stacked
from actmat.engine.apply import compute_dtype, merge_factors
from actmat.engine.inputs import Inputs
from actmat.engine.naming import named_errors
from actmat.engine.needs import Surroundings, needs_of
from actmat.engine.observer import Merged
from actmat.engine.task import Record, Task, join_stats
from actmat.errors import NumericalError
from actmat.experts.lora.adapter import Adapter
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.lapack import retry_stats
from actmat.linalg.lowrank import LowRank, Truncated, frobenius_norm, truncate, weighted_sum
from actmat.planning.adapter.layouts import ALPHA
from actmat.planning.model import Item
from actmat.planning.regions import Region, cut, matrix_label

__all__ = ["merge_full_tensor", "merge_module", "module_deltas"]


def merge_module(task: Task, inputs: Inputs) -> Record:
    """Merge and write the factors of one module.

    Raises:
        NumericalError, RecipeError: from the method, with the name of the module.
    """
    began = time.perf_counter()
    item, statistics = task.item, inputs.statistics
    deltas = _factors(item, inputs)
    with named_errors("module", item.name, task.call.method):
        dtype = torch.float64 if item.form == "factored" else compute_dtype(task)
        values = _merge_blocks(task, deltas, Surroundings(statistics, dtype))
    merged = _packed(item, values)
    truncated = truncate(LowRank(merged.b_OR * task.call.scale, merged.a_RI), item.pair.rank)
    task.stats = join_stats(task.stats, _norms(deltas, truncated))
    out = list(_stored(item, truncated.value))
    for spec in item.outputs[len(out) :]:
        is_scale = spec.name.endswith(ALPHA)
        out.append(torch.tensor(float(item.pair.rank), dtype=torch.float64) if is_scale else _bias(task, inputs))
    return _record(task, out, began)


def merge_full_tensor(task: Task, inputs: Inputs) -> Record:
    """Write the mean of a tensor that adapters trained in full, over those that have it."""
    began = time.perf_counter()
    item = task.item
    weights = task.call.weights or (1.0,) * len(item.sources)
    found = [(e, s, w) for e, s, w in zip(inputs.experts, item.sources, weights, strict=True) if s is not None]
    share = math.fsum(w for _, _, w in found)
    total = torch.zeros(item.shape, dtype=torch.float64)
    for expert, source, weight in found:
        total.add_(expert.read(source.name).to(torch.float64), alpha=weight / share)
    return _record(task, [total], began)


def module_deltas(item: Item, inputs: Inputs, dtype: torch.dtype) -> Iterator[list[Any]]:
    """Per logical matrix of a module, the deltas in the form that its method takes (for surveys).

    Args:
        dtype: of dense deltas.
    """
    for _, factors in _by_block(item, _factors(item, inputs)):
        yield factors if item.form == "factored" else [f.dense().to(dtype) for f in factors]


def _factors(item: Item, inputs: Inputs) -> list[LowRank]:
    """The experts' deltas of a module in float64; an expert without the module gives a zero of rank 1."""
    out = []
    for expert, source in zip(inputs.experts, item.sources, strict=True):
        if source is not None:
            adapter = _adapter(expert.adapter)
            out.append(adapter.factors(adapter.modules[source.name], torch.float64))
        else:
            *batch, rows, columns = item.shape
            b_OR = torch.zeros(*batch, rows, 1, dtype=torch.float64)
            out.append(LowRank(b_OR, torch.zeros(*batch, 1, columns, dtype=torch.float64)))
    return out


def _adapter(adapter: Adapter | None) -> Adapter:
    assert adapter is not None, "the plan of an adapter has adapters only"
    return adapter


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


def _merge_blocks(task: Task, deltas: Sequence[LowRank], around: Surroundings) -> list[LowRank]:
    """Merged delta of every block, finished."""
    region, by_matrix = _logical(task.item), task.item.form == "factored" or task.method.acts_on == "matrix"
    whole = None if by_matrix else _merge_stored(task, deltas, around)
    values = []
    for k, (label, own) in enumerate(_by_block(task.item, deltas)):
        if whole is None:
            values.append(_merge_block(task, region, k, own, around))
        else:
            value = _as_factors(region.layout.to_matrices(whole)[k])
            values.append(finish_factors(task, value, own, region.layout, label))
        _observe(task, label, own, values[-1])
    return values


def _merge_block(task: Task, region: Region, k: int, deltas: Sequence[LowRank], around: Surroundings) -> LowRank:
    """Merged delta of one block; random methods and spaces take a stack by matrix, as in a model."""
    if deltas[0].b_OR.ndim == 3 and (task.method.is_random or task.call.space != "full"):
        found = []
        for e in range(deltas[0].b_OR.shape[0]):
            own = [LowRank(d.b_OR[e], d.a_RI[e]) for d in deltas]
            found.append(_merge_block(task, dataclasses.replace(region, label=str(e)), k, own, around))
        return stacked(found)
    if task.item.form == "factored":
        return merge_factors(task, region, k, deltas, around)
    label = matrix_label(region, k)
    dense = [d.dense().to(around.dtype) for d in deltas]
    merged = task.method.merge(dense, **needs_of(task, region, k, label, around), **task.call.options)
    task.note(label, merged.stats)
    return finish_factors(task, _as_factors(merged.value), deltas, region.layout, label)


def _merge_stored(task: Task, deltas: Sequence[LowRank], around: Surroundings) -> Tensor:
    """The merged delta of a method that knows no matrices.

    It is given the tensor as a model stores it, in the regions of a merge into a model, so that random methods draw the
    same masks for both.
    """
    item = task.item
    turned = item.pair.transposed
    dense = [d.dense().to(around.dtype) for d in deltas]
    flat = [(d.mT if turned else d).reshape(-1) for d in dense]
    out = torch.empty_like(flat[0])
    for region in cut(item.pair.shape, item.layout, task.method.acts_on):
        own = [f[region.start : region.stop].view(region.shape) for f in flat]
        merged = task.method.merge(own, **needs_of(task, region, 0, region.label, around), **task.call.options)
        if task.method.acts_on == "tensor":
            task.note(region.label, merged.stats)
        out[region.start : region.stop] = merged.value.reshape(-1)
    return out.view(dense[0].mT.shape).mT if turned else out.view(item.shape)


def _observe(task: Task, label: str, deltas: Sequence[LowRank], value: LowRank) -> None:
    if task.observer is not None:
        shape = tuple(value.shape)
        region = Region(0, math.prod(shape), shape, TensorLayout(Role.LINEAR, ""), label)
        task.observer.region(Merged(region, (), [deltas], None, value, lambda k: None, task.stats))


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


def _record(task: Task, outputs: Sequence[Tensor], began: float) -> Record:
    """Write the outputs of an item, each rounded once."""
    hashes = {}
    for spec, tensor in zip(task.item.outputs, outputs, strict=True):
        sink = task.writer.sink(spec.name)
        sink.write(raw_bytes(_rounded(spec.name, tensor, torch_dtype(spec.dtype))))
        hashes[spec.name] = sink.digest
    return Record(
        name=task.item.name,
        hash=hash_names(hashes.items()),
        hashes=hashes,
        stats=task.stats,
        unchanged=task.item.factors is not None and not any(task.stats["expert_norms"]),
        seconds=time.perf_counter() - began,
        observed=task.observer.finish() if task.observer is not None else None,
    )


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a tensor to the output dtype.

    Raises:
        NumericalError: NaN, Inf, or values beyond the range of the dtype.
    """
    out = tensor.to(dtype).contiguous()
    if not bool(torch.isfinite(out).all()):
        finite = bool(torch.isfinite(tensor).all())
        raise NumericalError(
            f"tensor '{name}' has values beyond {dtype}'s range; write with --dtype bfloat16 or float32"
            if finite
            else f"tensor '{name}' came out with NaN or Inf for finite factors. Likely cause: options out of "
            "proportion to the deltas; try other options, or another method for this module"
        )
    return out


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


def _bias(task: Task, inputs: Inputs) -> Tensor:
    """Mean of what the experts add to the layer's bias, over those that add anything."""
    item = task.item
    total, share = torch.zeros(item.shape[-2], dtype=torch.float64), 0.0
    weights = task.call.weights if task.call.weights and sum(task.call.weights) else (1.0,) * len(inputs.experts)
    for expert, source, weight in zip(inputs.experts, item.sources, weights, strict=True):
        adapter = _adapter(expert.adapter)
        delta = None if source is None else adapter.bias_delta(adapter.modules[source.name], torch.float64)
        if delta is not None:
            total.add_(delta, alpha=weight)
            share += weight
    return total / share if share else total
