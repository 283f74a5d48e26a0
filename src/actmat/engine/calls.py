"""Call the method of a task on one region: its needs, logical matrices, post-processing, and a check of the result.

Steps of post-processing act where the method did: on the dense matrix, on its factors, or in the space of the method.
Caps come after them, on the delta itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.engine.deltas import LazySequence, mapped
from actmat.engine.memory import ALIGNMENT
from actmat.engine.task import Task
from actmat.errors import NumericalError, RecipeError
from actmat.linalg.caps import cap_delta, cap_lowrank
from actmat.linalg.lowrank import LowRank
from actmat.methods import Merged, MergeMethod
from actmat.methods.facets import Stages
from actmat.methods.post import apply_steps, apply_steps_lowrank
from actmat.methods.spaces import MERGE_IN
from actmat.planning.regions import Region, cut, matrix_label
from actmat.planning.statistics import ExpertStatistics


@contextlib.contextmanager
def named_errors(task: Task) -> Iterator[None]:
    """Raise errors of a task's method with the method's and the item's name.

    Raises:
        NumericalError: the method's own, or a factor that the compute dtype does not hold.
        RecipeError: from a ValueError: an option or a weight is invalid for these values.
    """
    kind = "tensor" if task.item.factors is None else "module"
    where = f"{kind} '{task.item.name}', method '{task.call.method}'"
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{where}: {error}") from error
    except ValueError as error:
        raise RecipeError(f"{where}: {error}") from error
    except RuntimeError as error:  # torch's for a factor that the dtype does not hold
        if not _has_extreme_numbers(task):
            raise
        raise NumericalError(
            f"{where}: an option or a weight gives a factor beyond the compute dtype's range; use values nearer to 1, "
            "or --set compute_dtype=float64"
        ) from error


def _has_extreme_numbers(task: Task) -> bool:
    """True if an option or a weight, or its inverse, is beyond the range of the compute dtype."""
    numbers = [n for n in (*(task.call.weights or ()), *task.call.options.values()) if isinstance(n, float) and n]
    largest = torch.finfo(compute_dtype(task)).max
    return any(math.isfinite(n) and not 1 / largest <= abs(n) <= largest for n in numbers)


@dataclass(frozen=True, slots=True)
class CallContext:
    """Values besides the deltas of one region that a method may need.

    Args:
        statistics: of the experts.
        dtype, device: of the method's input.
        base: `W_0` on the region in that dtype, shaped like the region; None if no method takes it.
        stages: first stages that were computed, by `stage_key`, for variants of one family and observers; None where
            nothing else takes them, so that a method may write its result over them.
    """

    statistics: ExpertStatistics
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    base: Tensor | None = None
    stages: dict[Any, Any] | None = None

    def first_stages(self, task: Task) -> Mapping[int, Any]:
        """Logical matrix -> result of the first stage of a task's method."""
        if task.method.stages is None or self.stages is None:
            return {}
        of_task = stage_key(task, task.method.stages, 0)[:2]
        return {key[2]: state for key, state in self.stages.items() if key[:2] == of_task}


def needs_of(task: Task, region: Region, k: int, label: str, context: CallContext) -> dict[str, Any]:
    """Keyword arguments of the method of a task, for logical matrix `k` of a region.

    Args:
        label: of the matrix; with the tensor's name and the recipe's seed it decides what a random method draws.
    """
    method, call = task.method, task.call
    needs: dict[str, Any] = {}
    if method.is_weighted:
        needs["weights"] = call.weights
    if method.uses_base(call.options) and (base := context.base) is not None:
        needs["base"] = region.layout.to_matrices(base)[k] if method.acts_on == "matrix" else base
    if method.is_random:
        tensor = task.item.name if task.item.factors is None else task.item.factors.tensor
        needs["generator"] = generator_for(task.plan.recipe.seed, tensor, label or str(region.start))
    if "survey" in method.needs:
        needs["survey"] = task.survey
    if method.needs_statistics and context.statistics.any:
        needs["statistics"] = _statistics(task, region, k, context)
    return needs


def generator_for(seed: int, name: str, label: str) -> torch.Generator:
    """A separate generator for every tensor and region, so that order, threads and shards change nothing."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{label}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _statistics(task: Task, region: Region, k: int, context: CallContext) -> Mapping[str, Sequence[Tensor]]:
    """Statistics of all experts for matrix `k` of a region, read on request."""
    method, files, dtype = task.method, context.statistics.complete, context.dtype
    if "fisher" in method.needs_statistics:
        pairs = list(zip(files, (s.name for s in task.item.sources if s is not None), strict=True))
        read = [partial(file.fisher, name, dtype=dtype) for file, name in pairs]
        return {"fisher": _kept(method, len(files), lambda t: read[t]().to(context.device))}
    keys = context.statistics.gram_keys(task.item, region, k)
    width = region.layout.matrix_shapes(region.shape)[k][-1]

    def gram(t: int) -> Tensor:
        key = keys[t]
        if key is None:
            return torch.zeros((width, width), dtype=dtype, device=context.device)
        return files[t].gram(key, dtype=dtype).to(context.device)

    found = {"gram": _kept(method, len(files), gram)}
    if all(key is not None and file.holds_rows(key) for file, key in zip(files, keys, strict=True)):
        found["root"] = LazySequence(len(files), lambda t: files[t].root(str(keys[t]), dtype=dtype).to(context.device))
    return found


def _kept(method: MergeMethod, count: int, read: Callable[[int], Tensor]) -> Sequence[Tensor]:
    """Read one at a time for a method that takes one pass over the experts; cached for any other."""
    lazy = LazySequence(count, read)
    return lazy if method.access.one_pass else list(lazy)


def finish_matrix(task: Task, merged: Tensor, deltas: Sequence[Tensor], label: str) -> Tensor:
    """Steps and cap of one matrix."""
    steps, cap = task.call.steps, task.caps.norm_cap
    if steps:
        changed = apply_steps(merged, deltas, steps)
        task.note(label, changed.stats)
        merged = changed.value
    if cap is not None:
        merged, stats = cap_delta(merged, deltas, cap)
        task.note(label, stats)
    return merged


def finish_tensor(task: Task, merged: Tensor, deltas: Sequence[Tensor], whole: Region) -> Tensor:
    """`finish_matrix` for each matrix of the tensor, after an elementwise method."""
    if task.caps.norm_cap is None and not task.call.post:  # else they need the deltas after the method
        return merged
    out = torch.empty_like(merged).reshape(-1)
    for region in cut(whole.shape, whole.layout, "matrix"):
        value, *own = (region.layout.to_matrices(narrowed(x, region).view(region.shape)) for x in (merged, *deltas))
        finished = [
            finish_matrix(task, matrix, [matrices[k] for matrices in own], matrix_label(region, k))
            for k, matrix in enumerate(value)
        ]
        out[region.start : region.stop].copy_(region.layout.from_matrices(finished, region.shape).reshape(-1))
    return out.view(merged.shape)


def finish_factors(task: Task, value: LowRank, deltas: Sequence[LowRank], label: str) -> LowRank:
    """Steps and caps of one merged delta; of each of a stack of experts, as a full model has them."""
    steps = task.call.steps
    if not steps:
        return limit_factors(task, value, deltas, label)
    found = []
    for own_label, (one, *own) in _each(label, value, *deltas):
        changed = apply_steps_lowrank(one, own, steps)
        task.note(own_label, changed.stats)
        found.append(changed.value)
    return limit_factors(task, found[0] if value.b_OR.ndim == 2 else stacked(found), deltas, label)


def limit_factors(task: Task, value: LowRank, deltas: Sequence[LowRank], label: str) -> LowRank:
    """Caps of one merged delta whose steps are done; of each of a stack."""
    value, stack = value.to(torch.float64), value.b_OR.ndim > 2
    if (cap := task.caps.norm_cap) is not None:
        capped = [cap_lowrank(one, own, cap) for _, (one, *own) in _each(label, value, *deltas)]
        value = stacked([one for one, _ in capped]) if stack else capped[0][0]
        task.note(label, {"caps": {str(e): stats for e, (_, stats) in enumerate(capped)}} if stack else capped[0][1])
    return value


def stacked(found: Sequence[LowRank]) -> LowRank:
    """Matrices as one stack; zeros make their ranks equal."""
    pad, top = torch.nn.functional.pad, max(f.rank for f in found)
    return LowRank(
        torch.stack([pad(f.b_OR, (0, top - f.rank)) for f in found]),
        torch.stack([pad(f.a_RI, (0, 0, 0, top - f.rank)) for f in found]),
    )


def narrowed(whole: Tensor, own: Region) -> Tensor:
    """Entries of a region of a whole tensor; at an aligned address, on which the last bits of a BLAS may depend."""
    entries = whole.reshape(-1)[own.start : own.stop]
    return entries if entries.data_ptr() % ALIGNMENT == 0 else entries.clone()


def _each(label: str, *deltas: LowRank) -> Iterator[tuple[str, Sequence[LowRank]]]:
    """Deltas matrix by matrix if they are stacks of experts, with the labels that a full model gives them."""
    if deltas[0].b_OR.ndim == 2:
        yield label, deltas
        return
    for e in range(deltas[0].b_OR.shape[0]):
        yield f"{e}/{label}" if label else str(e), [LowRank(d.b_OR[e], d.a_RI[e]) for d in deltas]


def apply_method(task: Task, region: Region, deltas: Sequence[Tensor], context: CallContext) -> Tensor:
    """Merged delta of one region, flat, in the compute dtype.

    Raises:
        NumericalError, RecipeError: from the method, with the name of the tensor.
    """
    with named_errors(task):
        if task.method.acts_on == "matrix":
            value = _merge_matrices(task, region, deltas, context)
        else:
            merged = _call(task, region, 0, region.label, deltas, context)
            if task.method.acts_on == "tensor":
                task.note(region.label, merged.stats)
            value = finish_tensor(task, merged.value, deltas, region)
        return checked_finite(value.reshape(-1), task)


def apply_to_factors(task: Task, region: Region, factors: Sequence[Sequence[LowRank]], context: CallContext) -> Tensor:
    """`apply_method` by the method's low-rank form; its result is expanded once.

    Args:
        factors: per logical matrix of the region, the factors of every expert, float64.
        context: its dtype is that of the factors.
    """
    values = []
    with named_errors(task):
        for k, deltas in enumerate(factors):
            merged = merge_factors(task, region, k, deltas, context)
            values.append(merged.dense().to(compute_dtype(task)))
        return checked_finite(region.layout.from_matrices(values, region.shape).reshape(-1), task)


def merge_factors(task: Task, region: Region, k: int, deltas: Sequence[LowRank], context: CallContext) -> LowRank:
    """Merged delta of logical matrix `k` of a region, as factors, finished."""
    method, call, label = task.method, task.call, matrix_label(region, k)
    needs = needs_of(task, region, k, label, context)
    if call.space != "full":
        merged = MERGE_IN[call.space](method, deltas, needs, call.options, call.steps)
        task.note(label, merged.stats)
        return limit_factors(task, merged.value, deltas, label)
    assert method.lowrank is not None, "the plan chose the factored form"
    merged = method.lowrank.merge(deltas, **needs, **call.options)
    task.note(label, merged.stats)
    return finish_factors(task, merged.value, deltas, label)


def compute_dtype(task: Task) -> torch.dtype:
    """dtype of deltas and methods."""
    return torch_dtype(task.plan.recipe.compute_dtype)


def _merge_matrices(task: Task, region: Region, deltas: Sequence[Tensor], context: CallContext) -> Tensor:
    layout = region.layout
    count = len(layout.matrix_shapes(region.shape))
    is_plain = not layout.blocks and layout.orientation == "OI" and len(region.shape) == 2
    split = [layout.to_matrices(d) for d in deltas] if count > 1 else None
    values = []
    for k in range(count):
        if split is not None:
            matrices: Sequence[Tensor] = [s[k] for s in split]
        else:  # deltas that are read on request share their memory: one matrix at a time
            matrices = deltas if is_plain else mapped(deltas, lambda d: layout.to_matrices(d)[0])
        label = matrix_label(region, k)
        merged = _call(task, region, k, label, matrices, context)
        task.note(label, merged.stats)
        values.append(finish_matrix(task, merged.value, matrices, label))
    return layout.from_matrices(values, region.shape)


def _call(task: Task, region: Region, k: int, label: str, deltas: Sequence[Tensor], context: CallContext) -> Merged:
    """Result of the method for one logical matrix, from its first stage if that was computed."""
    method, call, stages = task.method, task.call, context.stages
    needs = needs_of(task, region, k, label, context)
    if method.stages is None or stages is None:
        return method.merge(deltas, **needs, **call.options)
    key = stage_key(task, method.stages, k)
    if key not in stages:
        stages[key] = method.stages.prepare(deltas, **needs, **call.options)
    return method.stages.finish(stages[key], **needs, **call.options)


def stage_key(task: Task, stages: Stages, k: int) -> tuple[Any, ...]:
    """Key of the first stage of a task's method on logical matrix `k`; variants with equal keys share it."""
    return (stages.key(task.call.options), str(task.call.weights), k)


def checked_finite(value: Tensor, task: Task) -> Tensor:
    """Return the value, if all of it is finite.

    Raises:
        NumericalError: not all of it is finite.
    """
    # a sum is finite if every entry is (or it overflows): one cheap pass, an exact one only then
    if not bool(torch.isfinite(value.sum())) and not bool(torch.isfinite(value).all()):
        raise NumericalError(
            f"gave NaN or Inf for finite deltas, with options {dict(task.call.options)}. Likely cause: options out "
            "of proportion to the deltas, or deltas whose squares overflow; try --set compute_dtype=float64, other "
            "options, or another method for this tensor"
        )
    return value
