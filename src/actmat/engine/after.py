"""Steps of post-processing, caps, and factors of layers on each merged matrix, after its method.

Steps act where the method did: on the dense matrix, on its factors, or in the space of the method. Caps and factors of
layers come after them, on the delta itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.engine.task import Task
from actmat.layout.types import TensorLayout
from actmat.linalg.caps import cap_delta, cap_lowrank
from actmat.linalg.lowrank import LowRank
from actmat.methods.post import apply_steps, apply_steps_lowrank
from actmat.planning.post import has_spectrum
from actmat.planning.regions import Region, cut, matrix_label

__all__ = ["finish_factors", "finish_matrix", "finish_tensor", "limit_factors", "narrowed", "stacked"]

_ALIGNMENT = 64
"""Bytes: what torch's CPU allocator gives every new tensor."""


def finish_matrix(task: Task, merged: Tensor, deltas: Sequence[Tensor], layout: TensorLayout, label: str) -> Tensor:
    """Steps, caps and factor of one matrix; a table of vectors has no singular values, so only its norm is capped."""
    steps, caps = task.call.matrix_steps, task.caps
    if steps:
        changed = apply_steps(merged, deltas, steps)
        task.note(label, changed.stats)
        merged = changed.value
    if caps.caps:
        limit = caps.singular_value_cap if has_spectrum(layout) else None
        merged, stats = cap_delta(merged, deltas, norm_cap=caps.norm_cap, singular_value_cap=limit)
        task.note(label, stats)
    factor = _layer_factor(task, label)
    return merged if factor is None else merged * factor


def finish_tensor(task: Task, merged: Tensor, deltas: Sequence[Tensor], whole: Region) -> Tensor:
    """`finish_matrix` after a method that knows no matrices, for each matrix of the tensor all the same."""
    if not task.looks_again:
        return merged
    out = torch.empty_like(merged).reshape(-1)
    for region in cut(whole.shape, whole.layout, "matrix"):
        value, *own = (region.layout.to_matrices(narrowed(x, region).view(region.shape)) for x in (merged, *deltas))
        finished = [
            finish_matrix(task, matrix, [matrices[k] for matrices in own], region.layout, matrix_label(region, k))
            for k, matrix in enumerate(value)
        ]
        out[region.start : region.stop].copy_(region.layout.from_matrices(finished, region.shape).reshape(-1))
    return out.view(merged.shape)


def finish_factors(task: Task, value: LowRank, deltas: Sequence[LowRank], layout: TensorLayout, label: str) -> LowRank:
    """Steps, caps and factor of one merged delta; of each of a stack of experts, as a full model has them."""
    steps = task.call.matrix_steps
    if not steps:
        return limit_factors(task, value, deltas, layout, label)
    if value.b_OR.ndim == 2:
        changed = apply_steps_lowrank(value, deltas, steps)
        task.note(label, changed.stats)
        return limit_factors(task, changed.value, deltas, layout, label)
    found = []
    for e, (one, *own) in enumerate(_each(value, *deltas)):
        changed = apply_steps_lowrank(one, own, steps)
        task.note(_label(e, label), changed.stats)
        found.append(changed.value)
    return limit_factors(task, stacked(found), deltas, layout, label)


def limit_factors(task: Task, value: LowRank, deltas: Sequence[LowRank], layout: TensorLayout, label: str) -> LowRank:
    """Caps and factor of one merged delta whose steps are done; of each of a stack."""
    value = value.to(torch.float64)
    if task.caps.caps:
        value = _capped(task, value, deltas, layout, label)
    stack = value.b_OR.ndim > 2
    labels = [_label(e, label) for e in range(value.b_OR.shape[0])] if stack else [label]
    factors = [factor for one in labels if (factor := _layer_factor(task, one)) is not None]
    if not factors:
        return value
    by_matrix = torch.tensor(factors, dtype=torch.float64).view(-1, 1, 1) if stack else factors[0]
    return LowRank(value.b_OR * by_matrix, value.a_RI)


def _capped(task: Task, value: LowRank, deltas: Sequence[LowRank], layout: TensorLayout, label: str) -> LowRank:
    limits: dict[str, Any] = {
        "norm_cap": task.caps.norm_cap,
        "singular_value_cap": task.caps.singular_value_cap if has_spectrum(layout) else None,
    }
    if value.b_OR.ndim == 2:
        value, stats = cap_lowrank(value, deltas, **limits)
        task.note(label, stats)
        return value
    capped, found = [], {}
    for e, (one, *own) in enumerate(_each(value, *deltas)):
        one, found[str(e)] = cap_lowrank(one, own, **limits)
        capped.append(one)
    task.note(label, {"caps": found})
    return stacked(capped)


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
    return entries if entries.data_ptr() % _ALIGNMENT == 0 else entries.clone()


def _each(*stacks: LowRank) -> list[list[LowRank]]:
    return [[LowRank(s.b_OR[e], s.a_RI[e]) for s in stacks] for e in range(stacks[0].b_OR.shape[0])]


def _label(e: int, label: str) -> str:
    """Label of expert `e` of a stack, as the regions of a full model have it."""
    return f"{e}/{label}" if label else str(e)


def _layer_factor(task: Task, label: str) -> float | None:
    """Factor of a matrix, which goes into the record; None while layers are measured, or where nothing scales them."""
    if task.layer_factors is None:
        return None
    factor = task.layer_factors[label]
    task.note(label, {"layer_factor": factor})
    return factor
