"""Merge into memory, from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actmat.api.merging import Location, make_arguments
from actmat.in_memory import MemoryMerge, run_in_memory
from actmat.notebook import usual_progress
from actmat.progress import Progress

__all__ = ["MemoryMerge", "merge_in_memory"]


def merge_in_memory(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    method: str = "actmat",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> MemoryMerge:
    """Merge checkpoints and keep the result in memory; arguments as for `merge`, without `out`.

    `found.tensors` are the bytes that `merge` would write, `found.load().model` is the model, ready to run.

    Raises:
        MergeError: whatever `merge` would raise, or an output that is larger than the free memory.
    """
    recipe, settings = make_arguments(base, experts, {"method": method} | fields, weights, statistics)
    return run_in_memory(recipe, settings, progress or usual_progress())
