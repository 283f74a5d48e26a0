"""Decisions of the planners of models and of adapters; `build` makes a plan of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.planning.model import Item

__all__ = ["Draft", "headline"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Fields of a `MergePlan` that differ between outputs; `ignored`: per expert, tensors that are not merged."""

    items: tuple[Item, ...]
    specs: tuple[TensorSpec, ...]
    max_shard_bytes: int
    stem: str = "model"
    stems: Mapping[str, str] = field(default_factory=dict)
    family: str | None = None
    adapter_config: Mapping[str, Any] | None = None
    kept: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


def headline(problems: Sequence[str]) -> str:
    """First line of an error that lists these problems."""
    n = len(problems)
    return f"The merge cannot be done: {n} problem{'s' if n > 1 else ''}."
