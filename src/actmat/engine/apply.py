"""Apply the method of one task to one region: give it what it needs, split and join matrices, cap, check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.engine.deltas import mapped
from actmat.engine.naming import named_errors
from actmat.engine.needs import Surroundings, needs_of
from actmat.engine.task import Task
from actmat.errors import NumericalError
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.caps import cap_delta, cap_lowrank
from actmat.linalg.lowrank import LowRank
from actmat.methods import Merged
from actmat.plan.regions import Region, cut

__all__ = [
    "apply_method",
    "apply_to_factors",
    "cap_factors",
    "checked_finite",
    "compute_dtype",
    "matrix_label",
    "merge_factors",
    "narrowed",
    "stage_key",
]

_ALIGNMENT = 64
"""Bytes: what torch's CPU allocator gives every new tensor."""

Call = Callable[[Sequence[Tensor], str, int], Merged]


def apply_method(task: Task, region: Region, deltas: Sequence[Tensor], around: Surroundings) -> Tensor:
    """Merged delta of one region, flat, in the compute dtype.

    Raises:
        NumericalError, RecipeError: from the method, with the name of the tensor.
    """

    def call(deltas: Sequence[Tensor], label: str, k: int) -> Merged:
        return _call(task, deltas, needs_of(task, region, k, label, around), k, around.stages)

    with named_errors(task.kind, task.item.name, task.call.method):
        if task.method.acts_on == "matrix":
            value = _merge_matrices(task, region, deltas, call)
        else:
            merged = call(deltas, region.label, 0)
            if task.method.acts_on == "tensor":
                task.note(region.label, merged.stats)
            value = _cap_matrices(task, merged.value, deltas, region)
        return checked_finite(value.reshape(-1), task)


def apply_to_factors(task: Task, region: Region, factors: Sequence[Sequence[LowRank]], around: Surroundings) -> Tensor:
    """`apply_method` by the method's low-rank form; multiplied out once.

    Args:
        factors: per logical matrix of the region, the factors of every expert, float64.
        around: see `Surroundings`; its dtype is that of the factors.
    """
    values = []
    with named_errors(task.kind, task.item.name, task.call.method):
        for k, deltas in enumerate(factors):
            merged = merge_factors(task, region, k, deltas, around)
            values.append(merged.dense().to(compute_dtype(task)))
        return checked_finite(region.layout.from_matrices(values, region.shape).reshape(-1), task)


def merge_factors(task: Task, region: Region, k: int, deltas: Sequence[LowRank], around: Surroundings) -> LowRank:
    """Merged delta of logical matrix `k` of a region, as factors, capped."""
    method, label = task.method, matrix_label(region, k)
    assert method.merge_lowrank is not None, "the plan chose the factored form"
    merged = method.merge_lowrank(deltas, **needs_of(task, region, k, label, around), **task.call.options)
    task.note(label, merged.stats)
    return cap_factors(task, merged.value, deltas, region, label)


def cap_factors(task: Task, value: LowRank, deltas: Sequence[LowRank], region: Region, label: str) -> LowRank:
    """The recipe's caps on one merged delta; on each of a stack of experts, as a full model has them."""
    value = value.to(torch.float64)
    if not task.caps.caps:
        return value
    limits: dict[str, Any] = {
        "norm_cap": task.caps.norm_cap,
        "singular_value_cap": task.caps.singular_value_cap if _has_singular_values(region.layout) else None,
    }
    if value.b_OR.ndim == 2:
        value, stats = cap_lowrank(value, deltas, **limits)
        task.note(label, stats)
        return value
    capped, found = [], {}
    for e in range(value.b_OR.shape[0]):
        one, *own = (LowRank(d.b_OR[e], d.a_RI[e]) for d in (value, *deltas))
        one, found[str(e)] = cap_lowrank(one, own, **limits)
        capped.append(one)
    task.note(label, {"caps": found})
    return LowRank(torch.stack([c.b_OR for c in capped]), torch.stack([c.a_RI for c in capped]))


def compute_dtype(task: Task) -> torch.dtype:
    """dtype of deltas and methods."""
    return torch_dtype(task.plan.recipe.compute_dtype)


def _merge_matrices(task: Task, region: Region, deltas: Sequence[Tensor], call: Call) -> Tensor:
    count = len(region.layout.matrix_shapes(region.shape))
    split = [region.layout.to_matrices(d) for d in deltas] if count > 1 else None
    values = []
    for k in range(count):
        if split is not None:
            matrices: Sequence[Tensor] = [s[k] for s in split]
        else:  # deltas that are read on request share their memory: one matrix at a time
            matrices = deltas if _is_single(region) else mapped(deltas, lambda d: region.layout.to_matrices(d)[0])
        label = matrix_label(region, k)
        merged = call(matrices, label, k)
        task.note(label, merged.stats)
        values.append(_cap(task, merged.value, matrices, region.layout, label))
    return region.layout.from_matrices(values, region.shape)


def _call(
    task: Task, deltas: Sequence[Tensor], needs: Mapping[str, Any], k: int, stages: dict[Any, Any] | None
) -> Merged:
    method, call = task.method, task.call
    if method.stages is None or stages is None:
        return method.merge(deltas, **needs, **call.options)
    key = stage_key(task, k)
    if key not in stages:
        stages[key] = method.stages.prepare(deltas, **needs, **call.options)
    return method.stages.finish(stages[key], **needs, **call.options)


def stage_key(task: Task, k: int) -> Any:
    """Key of the first stage of a task's method on logical matrix `k`; variants with equal keys share it."""
    assert task.method.stages is not None
    return (task.method.stages.key(task.call.options), str(task.call.weights), k)


def checked_finite(value: Tensor, task: Task) -> Tensor:
    """The value itself, once it is known to be finite.

    Raises:
        NumericalError: not all of it is finite.
    """
    # a sum is finite if every entry is (or it overflows): one cheap pass, an exact one only then
    if not bool(torch.isfinite(value.sum())) and not bool(torch.isfinite(value).all()):
        raise NumericalError(
            f"gave NaN or Inf for finite deltas, with options {dict(task.call.options)}. Likely cause: options out "
            "of proportion to the deltas, or deltas whose squares overflow; try --compute-dtype float64, other "
            "options, or another method for this tensor"
        )
    return value


def _has_singular_values(layout: TensorLayout) -> bool:
    return layout.role.is_matrix or layout.role is Role.CONVOLUTION


def _is_single(region: Region) -> bool:
    layout = region.layout
    return not layout.blocks and layout.orientation == "OI" and len(region.shape) == 2


def _cap_matrices(task: Task, merged: Tensor, deltas: Sequence[Tensor], whole: Region) -> Tensor:
    """Caps after a method that knows no matrices: they hold for each matrix of the tensor all the same."""
    if not task.caps.caps:
        return merged
    out = torch.empty_like(merged).reshape(-1)
    for region in cut(whole.shape, whole.layout, "matrix"):
        value, *own = (region.layout.to_matrices(narrowed(x, region).view(region.shape)) for x in (merged, *deltas))
        capped = [
            _cap(task, matrix, [matrices[k] for matrices in own], region.layout, matrix_label(region, k))
            for k, matrix in enumerate(value)
        ]
        out[region.start : region.stop].copy_(region.layout.from_matrices(capped, region.shape).reshape(-1))
    return out.view(merged.shape)


def _cap(task: Task, merged: Tensor, deltas: Sequence[Tensor], layout: TensorLayout, label: str) -> Tensor:
    """Caps on one matrix; a table of vectors has no singular values worth the name, so only its norm is capped."""
    caps = task.caps
    if not caps.caps:
        return merged
    limit = caps.singular_value_cap if _has_singular_values(layout) else None
    value, stats = cap_delta(merged, deltas, norm_cap=caps.norm_cap, singular_value_cap=limit)
    task.note(label, stats)
    return value


def matrix_label(region: Region, k: int) -> str:
    """Label of logical matrix `k` of a region in records: "q", "3/gate"."""
    blocks = region.layout.blocks
    return "/".join(x for x in (region.label, blocks[k].name if blocks else "") if x)


def narrowed(whole: Tensor, own: Region) -> Tensor:
    """Entries of a region of a whole tensor; at an aligned address, on which the last bits of a BLAS may depend."""
    entries = whole.reshape(-1)[own.start : own.stop]
    return entries if entries.data_ptr() % _ALIGNMENT == 0 else entries.clone()
