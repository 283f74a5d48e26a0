"""Call the method of a task on one region: its needs, logical matrices, post-processing, and a check of the result.

    D* = method(D_1, ..., D_T),    or on factors  b a = method(b_1 a_1, ..., b_T a_T)

Steps of post-processing act where the method did: on the dense matrix, on its factors, or in the space of the method.
A module of adapters without a base is merged block by block into factors; a method without a form on factors is given
the products.

Shapes: `O` out_features, `I` in_features, `R` rank, `E` stacked experts. Factors are float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actmat.engine.deltas import LazySequence, RegionDeltas, mapped, narrow
from actmat.engine.observer import ObservedMerge
from actmat.engine.task import Task
from actmat.errors import NumericalError, RecipeError
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.inner import is_finite
from actmat.linalg.lowrank import LowRank, with_identity
from actmat.methods import Merged, MergeMethod
from actmat.methods.post import apply_steps, apply_steps_lowrank
from actmat.methods.spaces import MERGE_IN
from actmat.planning.item import Item
from actmat.planning.regions import Region, cut, matrix_label


def merge_region(task: Task, deltas: RegionDeltas) -> Tensor | LowRank:
    """Merged delta of one region: flat, in the compute dtype; of a module, as factors.

    Raises:
        NumericalError, RecipeError: from the method, with the name of the item.
    """
    region = deltas.region
    with named_errors(task):
        if task.item.is_module:
            return _merge_module(task, deltas)
        if task.item.is_factored:
            factored = (_merge_factors(task, deltas, region, k, matrices) for k, matrices in enumerate(deltas.factors))
            values = [value.dense().to(task.compute_dtype) for value in factored]
            value = region.layout.from_matrices(values, region.shape)
        elif task.method.acts_on == "matrix":
            value = _merge_matrices(task, deltas)
        else:
            merged = _call(task, deltas, region, 0, region.label, deltas)
            if task.method.acts_on == "tensor":
                task.note(region.label, merged.stats)
            value = finish_tensor(task, merged.value, deltas, region)
        return checked_finite(value.reshape(-1), task)


def _merge_matrices(task: Task, deltas: RegionDeltas) -> Tensor:
    region, layout = deltas.region, deltas.region.layout
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
        merged = _call(task, deltas, region, k, label, matrices)
        task.note(label, merged.stats)
        values.append(finish_matrix(task, merged.value, matrices, label))
    return layout.from_matrices(values, region.shape)


def _merge_factors(task: Task, deltas: RegionDeltas, region: Region, k: int, factors: Sequence[LowRank]) -> LowRank:
    """Merged delta of logical matrix `k` of a region, from its factors, finished."""
    method, call, label = task.method, task.call, matrix_label(region, k)
    needs = _needs_of(task, deltas, region, k, label)
    if call.space != "full":
        merged = MERGE_IN[call.space](method, factors, {**needs, **call.options}, call.post)
        task.note(label, merged.stats)
        return merged.value.to(torch.float64)
    assert method.lowrank is not None, "the plan chose the factored form"
    merged = method.lowrank.merge(factors, **needs, **call.options)
    task.note(label, merged.stats)
    return finish_factors(task, merged.value, factors, label)


def _merge_module(task: Task, deltas: RegionDeltas) -> LowRank | Tensor:
    """Merged delta of a module, after its steps, of which an observer is given every block.

    Dense if the method took dense deltas and nothing follows: what is written is truncated from it.
    """
    region, by_matrix = deltas.region, task.item.is_factored or task.method.acts_on == "matrix"
    is_last = not task.call.post and task.observer is None
    whole = None if by_matrix else _merge_stored(task, deltas)
    if is_last and whole is not None:
        return whole
    if is_last and not (task.item.is_factored or task.item.module.blocks or task.method.is_random):
        return _merge_dense(task, deltas, region, 0, deltas.whole_factors)
    values = []
    for k, factors in enumerate(deltas.factors):
        label = matrix_label(region, k)
        if whole is None:
            value = _merge_block(task, deltas, region, k, factors)
        else:
            value = finish_factors(task, with_identity(region.layout.to_matrices(whole)[k]), factors, label)
        if task.observer is not None:
            shape = tuple(value.shape)
            block = Region(0, math.prod(shape), shape, TensorLayout(Role.LINEAR, ""), label)
            task.observer.region(ObservedMerge(block, (), [factors], None, value))
        values.append(value)
    return _packed(task.item, values)


def _merge_block(task: Task, deltas: RegionDeltas, region: Region, k: int, factors: Sequence[LowRank]) -> LowRank:
    """Merged delta of one block; random methods and spaces take a stack matrix by matrix, as in a model."""
    if factors[0].b_OR.ndim == 3 and (task.method.is_random or task.call.space != "full"):
        values = []
        for e in range(factors[0].b_OR.shape[0]):
            of_matrix = [LowRank(d.b_OR[e], d.a_RI[e]) for d in factors]
            values.append(_merge_block(task, deltas, dataclasses.replace(region, label=str(e)), k, of_matrix))
        return stacked(values)
    if task.item.is_factored:
        return _merge_factors(task, deltas, region, k, factors)
    merged = _merge_dense(task, deltas, region, k, factors)
    return finish_factors(task, with_identity(merged), factors, matrix_label(region, k))


def _merge_dense(task: Task, deltas: RegionDeltas, region: Region, k: int, factors: Sequence[LowRank]) -> Tensor:
    """Merged delta of one block by a matrix method that takes dense deltas."""
    label = matrix_label(region, k)
    dense = [d.dense().to(task.compute_dtype) for d in factors]
    merged = task.method.merge(dense, **_needs_of(task, deltas, region, k, label), **task.call.options)
    task.note(label, merged.stats)
    return merged.value


def _merge_stored(task: Task, deltas: RegionDeltas) -> Tensor:
    """The merged delta of an elementwise method on a module.

    It is given the tensor as a model stores it, in the regions of a merge into a model, so that random methods draw the
    same masks for both.
    """
    item = task.item
    turned = item.module.transposed
    dense = [d.dense().to(task.compute_dtype) for d in deltas.whole_factors]
    flat = [(d.mT if turned else d).reshape(-1) for d in dense]
    out = torch.empty_like(flat[0])
    for region in cut(item.target.spec.shape, item.layout, task.method.acts_on):
        pieces = [f[region.start : region.stop].view(region.shape) for f in flat]
        merged = task.method.merge(pieces, **_needs_of(task, deltas, region, 0, region.label), **task.call.options)
        if task.method.acts_on == "tensor":
            task.note(region.label, merged.stats)
        out[region.start : region.stop] = merged.value.reshape(-1)
    return out.view(dense[0].mT.shape).mT if turned else out.view(item.shape)


def observed_deltas(task_item: Item, deltas: RegionDeltas, acts_on: str) -> Iterator[Sequence[Any]]:
    """The deltas of a region as a survey observes them: one list of all experts per logical matrix or tensor."""
    if task_item.is_module:
        for factors in deltas.factors:
            yield factors if task_item.is_factored else [f.dense().to(deltas.dtype) for f in factors]
        return
    split = [deltas.region.layout.to_matrices(d) if acts_on == "matrix" else [d] for d in deltas.held()]
    yield from ([s[k] for s in split] for k in range(len(split[0])))


def _call(task: Task, deltas: RegionDeltas, region: Region, k: int, label: str, matrices: Sequence[Tensor]) -> Merged:
    """Result of the method for one logical matrix, from its first stage if that was computed."""
    method, call, stages = task.method, task.call, deltas.stages
    needs = _needs_of(task, deltas, region, k, label)
    if method.stages is None or stages is None:
        return method.merge(matrices, **needs, **call.options)
    key = (method.stages.key(call.options), str(call.weights), k)
    if key not in stages:
        stages[key] = method.stages.prepare(matrices, **needs, **call.options)
    return method.stages.finish(stages[key], **needs, **call.options)


def _needs_of(task: Task, deltas: RegionDeltas, region: Region, k: int, label: str) -> dict[str, Any]:
    """Keyword arguments of the method of a task, for logical matrix `k` of a region.

    Args:
        label: of the matrix; with the tensor's name and the recipe's seed it decides what a random method draws.
    """
    method, call, needs = task.method, task.call, dict[str, Any]()
    if method.is_weighted:
        needs["weights"] = call.weights
    if method.uses_base(call.options) and task.item.has_base and not task.item.is_factored:
        base = deltas.base
        needs["base"] = region.layout.to_matrices(base)[k] if method.acts_on == "matrix" else base
    if method.is_random:
        needs["generator"] = generator_for(
            task.plan.recipe.seed, task.item.target.spec.name, label or str(region.start)
        )
    if "survey" in method.needs:
        needs["survey"] = task.survey
    if method.needs_statistics and deltas.reader.inputs.statistics.any:
        needs["statistics"] = _statistics(task, deltas, region, k)
    return needs


def generator_for(seed: int, name: str, label: str) -> torch.Generator:
    """A separate generator for every tensor and region, so that order, threads and shards change nothing."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{label}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _statistics(task: Task, deltas: RegionDeltas, region: Region, k: int) -> Mapping[str, Sequence[Tensor]]:
    """Statistics of all experts for matrix `k` of a region, read on request."""
    method, reader = task.method, deltas.reader
    statistics, files = reader.inputs.statistics, reader.inputs.statistics.complete
    on_factors = task.item.is_factored
    dtype, device = (torch.float64, torch.device("cpu")) if on_factors else (reader.compute_dtype, reader.device)
    if "fisher" in method.needs_statistics:
        pairs = list(zip(files, (s.name for s in task.item.sources if s is not None), strict=True))
        read = [partial(file.fisher, name, dtype=dtype) for file, name in pairs]
        return {"fisher": _kept(method, len(files), lambda t: read[t]().to(device))}
    keys = statistics.gram_keys(task.item, region, k)
    width = region.layout.matrix_shapes(region.shape)[k][-1]

    def gram(t: int) -> Tensor:
        key = keys[t]
        if key is None:
            return torch.zeros((width, width), dtype=dtype, device=device)
        return files[t].gram(key, dtype=dtype).to(device)

    values = {"gram": _kept(method, len(files), gram)}
    if all(key is not None and file.holds_rows(key) for file, key in zip(files, keys, strict=True)):
        values["root"] = LazySequence(len(files), lambda t: files[t].root(str(keys[t]), dtype=dtype).to(device))
    return values


def _kept(method: MergeMethod, count: int, read: Callable[[int], Tensor]) -> Sequence[Tensor]:
    """Read one at a time for a method that takes one pass over the experts; cached for any other."""
    lazy = LazySequence(count, read)
    return lazy if method.access.one_pass else list(lazy)


def finish_matrix(task: Task, merged: Tensor, deltas: Sequence[Tensor], label: str) -> Tensor:
    """One matrix after the steps of post-processing."""
    if not task.call.post:
        return merged
    changed = apply_steps(merged, deltas, task.call.post)
    task.note(label, changed.stats)
    return changed.value


def finish_tensor(task: Task, merged: Tensor, deltas: Sequence[Tensor], whole: Region) -> Tensor:
    """`finish_matrix` for each matrix of the tensor, after an elementwise method."""
    if not task.call.post:  # else they need the deltas after the method
        return merged
    out = torch.empty_like(merged).reshape(-1)
    for region in cut(whole.shape, whole.layout, "matrix"):
        value, *rest = (region.layout.to_matrices(narrow(x, region).view(region.shape)) for x in (merged, *deltas))
        finished = [
            finish_matrix(task, matrix, [matrices[k] for matrices in rest], matrix_label(region, k))
            for k, matrix in enumerate(value)
        ]
        out[region.start : region.stop].copy_(region.layout.from_matrices(finished, region.shape).reshape(-1))
    return out.view(merged.shape)


def finish_factors(task: Task, value: LowRank, deltas: Sequence[LowRank], label: str) -> LowRank:
    """One merged delta, in float64, after its steps; each of a stack of experts, as a full model has them."""
    if not task.call.post:
        return value.to(torch.float64)
    finished = []
    for each_label, (merged, *rest) in _each(label, value, *deltas):
        changed = apply_steps_lowrank(merged, rest, task.call.post)
        task.note(each_label, changed.stats)
        finished.append(changed.value)
    return (finished[0] if value.b_OR.ndim == 2 else stacked(finished)).to(torch.float64)


def stacked(matrices: Sequence[LowRank]) -> LowRank:
    """Matrices as one stack; zeros make their ranks equal."""
    pad, top = torch.nn.functional.pad, max(f.rank for f in matrices)
    return LowRank(
        torch.stack([pad(f.b_OR, (0, top - f.rank)) for f in matrices]),
        torch.stack([pad(f.a_RI, (0, 0, 0, top - f.rank)) for f in matrices]),
    )


def _each(label: str, *deltas: LowRank) -> Iterator[tuple[str, Sequence[LowRank]]]:
    """Deltas matrix by matrix if they are stacks of experts, with the labels that a full model gives them."""
    if deltas[0].b_OR.ndim == 2:
        yield label, deltas
        return
    for e in range(deltas[0].b_OR.shape[0]):
        yield f"{e}/{label}" if label else str(e), [LowRank(d.b_OR[e], d.a_RI[e]) for d in deltas]


def _packed(item: Item, regions: Sequence[LowRank]) -> LowRank:
    """`[b_1 a_1; b_2 a_2; ...]` with block-diagonal `b`, in the order in which the rows are stored."""
    if not item.module.blocks:
        return regions[0]
    total = sum(p.rank for p in regions)
    wide, start = [], 0
    for region in regions:
        wide.append(torch.nn.functional.pad(region.b_OR, (start, total - start - region.rank)))
        start += region.rank
    layout = TensorLayout(Role.FUSED_LINEAR, "", blocks=item.module.blocks)
    shape = (*item.shape[:-1], total)
    return LowRank(layout.from_matrices(wide, shape), torch.cat([p.a_RI for p in regions], dim=-2))


@contextlib.contextmanager
def named_errors(task: Task) -> Iterator[None]:
    """Raise errors of a task's method with the method's and the item's name.

    Raises:
        NumericalError: the method's own, or a factor that the compute dtype does not hold.
        RecipeError: from a ValueError: an option or a weight is invalid for these values.
    """
    kind = "module" if task.item.is_module else "tensor"
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
    largest = torch.finfo(task.compute_dtype).max
    return any(math.isfinite(n) and not 1 / largest <= abs(n) <= largest for n in numbers)


def checked_finite(value: Tensor, task: Task) -> Tensor:
    """Return the value, if all of it is finite.

    Raises:
        NumericalError: not all of it is finite.
    """
    if not is_finite(value):
        raise NumericalError(
            f"gave NaN or Inf for finite deltas, with options {dict(task.call.options)}. Likely cause: options out "
            "of proportion to the deltas, or deltas whose squares overflow; try --set compute_dtype=float64, other "
            "options, or another method for this tensor"
        )
    return value
