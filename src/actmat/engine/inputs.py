"""The open inputs of a merge: base, experts, statistics. Thread-safe for reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmat.checkpoints.model import Model
from actmat.errors import Problems
from actmat.experts.deltas import Deltas
from actmat.planning.item import Item
from actmat.planning.statistics import ExpertStatistics
from actmat.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs that all outputs of one run share: the first of its three stages.

    Args:
        recipes: each with a named method and its kind of output.
        base: None if adapters are merged into an adapter.
        experts: in the order of the recipes.
        statistics: of the experts, for methods that need them.
        base_config: `config.json` of the base that is named for adapters, which tells packed projections apart.
        problems: found so far; planning adds its own.
        began: start of the run on the performance counter.
    """

    recipes: tuple[Recipe, ...]
    base: Model | None
    experts: Sequence[Deltas]
    statistics: ExpertStatistics
    base_config: Mapping[str, Any] | None = None
    problems: Problems = field(default_factory=Problems)
    began: float = 0.0

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the experts, for messages."""
        return self.statistics.labels

    @property
    def buffer_bytes(self) -> int:
        """Memory that one worker takes to read the inputs ahead: those in remote storage."""
        held = sum(expert.model.tensors.buffer_bytes for expert in self.experts)
        return held + (0 if self.base is None else self.base.tensors.buffer_bytes)

    def prefetch(self, item: Item) -> None:
        """Ask the system to read ahead what the item needs."""
        if self.base is not None:
            self.base.tensors.prefetch([item.name])
        for expert, source in zip(self.experts, item.sources, strict=False):
            if source is not None and not expert.needs_base:
                expert.model.tensors.prefetch([source.name])
