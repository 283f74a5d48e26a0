"""Apply the method of one task to one region: give it what it needs, split and join matrices, finish, check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.engine.after import finish_factors, finish_matrix, finish_tensor, limit_factors
from actmat.engine.deltas import mapped
from actmat.engine.naming import named_errors
from actmat.engine.needs import Surroundings, needs_of
from actmat.engine.task import Task
from actmat.errors import NumericalError
from actmat.linalg.lowrank import LowRank
from actmat.methods import Merged
from actmat.methods.spaces import MERGE_IN
from actmat.planning.regions import Region, matrix_label

__all__ = [
    "apply_method",
    "apply_to_factors",
    "checked_finite",
    "compute_dtype",
    "merge_factors",
    "stage_key",
]

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
            value = finish_tensor(task, merged.value, deltas, region)
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
    """Merged delta of logical matrix `k` of a region, as factors, finished."""
    method, call, label = task.method, task.call, matrix_label(region, k)
    needs = needs_of(task, region, k, label, around)
    if call.space != "full":
        merged = MERGE_IN[call.space](method, deltas, needs, call.options, call.matrix_steps)
        task.note(label, merged.stats)
        return limit_factors(task, merged.value, deltas, region.layout, label)
    assert method.lowrank is not None, "the plan chose the factored form"
    merged = method.lowrank.merge(deltas, **needs, **call.options)
    task.note(label, merged.stats)
    return finish_factors(task, merged.value, deltas, region.layout, label)


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
        values.append(finish_matrix(task, merged.value, matrices, region.layout, label))
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


def _is_single(region: Region) -> bool:
    layout = region.layout
    return not layout.blocks and layout.orientation == "OI" and len(region.shape) == 2
