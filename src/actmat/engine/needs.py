"""Fill in what a method takes besides its deltas and options: weights, base, generator, survey, statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.engine.deltas import LazySequence
from actmat.engine.task import Task
from actmat.methods import MergeMethod
from actmat.planning.regions import Region
from actmat.planning.statistics import ExpertStatistics

__all__ = ["Surroundings", "generator_for", "needs_of"]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Everything around the deltas of one region that a method may need.

    Args:
        statistics: of the experts.
        dtype, device: of what the method is given.
        base: `W_0` on a region in that dtype, shaped like the region; None where there is no base.
        stages: first stages of methods, for variants of one family and observers; None where nothing else takes them,
            so that a method may write its result over them.
    """

    statistics: ExpertStatistics
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    base: Callable[[Region], Tensor] | None = None
    stages: dict[Any, Any] | None = None


def needs_of(task: Task, region: Region, k: int, label: str, around: Surroundings) -> dict[str, Any]:
    """Keyword arguments of the method of a task, for logical matrix `k` of a region.

    Args:
        label: of the matrix; with the tensor's name and the recipe's seed it decides what a random method draws.
    """
    method, call = task.method, task.call
    needs: dict[str, Any] = {}
    if method.is_weighted:
        needs["weights"] = call.weights
    if method.uses_base(call.options) and around.base is not None:
        whole = around.base(region)
        needs["base"] = region.layout.to_matrices(whole)[k] if method.acts_on == "matrix" else whole
    if method.is_random:
        tensor = task.item.name if task.item.factors is None else task.item.factors.tensor
        needs["generator"] = generator_for(task.plan.recipe.seed, tensor, label or str(region.start))
    if "survey" in method.needs:
        needs["survey"] = task.survey
    if method.needs_statistics and around.statistics.any:
        needs["statistics"] = _statistics(task, region, k, around)
    return needs


def generator_for(seed: int, name: str, label: str) -> torch.Generator:
    """A generator of its own for every tensor and region: order, threads and shards change nothing."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{label}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _statistics(task: Task, region: Region, k: int, around: Surroundings) -> Mapping[str, Sequence[Tensor]]:
    """Statistics of all experts for matrix `k` of a region, read when asked for."""
    method, files = task.method, around.statistics.files
    if "fisher" in method.needs_statistics:
        return {"fisher": _kept(method, len(files), lambda t: _fisher(task, t, around))}
    keys = around.statistics.gram_keys(task.item, region, k)
    width = region.layout.matrix_shapes(region.shape)[k][-1]

    def gram(t: int) -> Tensor:
        file, key = files[t], keys[t]
        assert file is not None, "the plan chose a method that needs it"
        if key is None:
            return torch.zeros((width, width), dtype=around.dtype, device=around.device)
        return file.gram(key, mean=task.plan.recipe.gram_mean, dtype=around.dtype).to(around.device)

    return {"gram": _kept(method, len(files), gram)}


def _fisher(task: Task, t: int, around: Surroundings) -> Tensor:
    file, source = around.statistics.files[t], task.item.sources[t]
    assert file is not None, "the plan chose a method that needs it"
    assert source is not None
    return file.fisher(source.name, dtype=around.dtype).to(around.device)


def _kept(method: MergeMethod, count: int, read: Callable[[int], Tensor]) -> Sequence[Tensor]:
    """One at a time for a method that takes one pass over the experts; any other may ask again, so they are kept."""
    lazy = LazySequence(count, read)
    return lazy if method.access.one_pass else list(lazy)
