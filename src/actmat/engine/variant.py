"""One output of one tensor: what its plan asks for, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from actmat.engine.statistics import RuleStatistics
from actmat.engine.watch import WATCHED, Sink, Watch
from actmat.methods import MergeMethod, get_method
from actmat.plan.model import MethodCall, TensorPlan
from actmat.plan.parts import Part, cut, granularity
from actmat.recipe import Postprocess

__all__ = ["TensorRecord", "Variant"]


@dataclass
class Variant:
    """One output of a tensor: what its plan asks for, where its bytes go, what the survey found, who watches."""

    item: TensorPlan
    sink: Sink
    seed: int
    postprocess: Postprocess
    survey: Any = None
    statistics: RuleStatistics | None = None
    watch: Watch | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def call(self) -> MethodCall:
        """The rule; only for items that have one."""
        assert self.item.call is not None
        return self.item.call

    @property
    def method(self) -> MergeMethod:
        """Declaration of the rule."""
        return get_method(self.call.method)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What one call of the rule sees, in storage order; a copy is content with any and names none."""
        if self.item.call is None:
            return ()
        return tuple(cut(self.item.shape, self.item.layout, granularity(self.method, self.postprocess)))


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What happened to one tensor of one output; goes into the journal and the manifest."""

    name: str
    hash: str
    base_hash: str
    expert_hashes: tuple[str, ...] = ()
    stats: Mapping[str, Any] = field(default_factory=dict)
    unchanged: bool = False
    nonfinite: int = 0
    seconds: float = 0.0
    watched: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "hash": self.hash,
            "base_hash": self.base_hash,
            "expert_hashes": list(self.expert_hashes),
            "stats": dict(self.stats),
            "unchanged": self.unchanged,
            "nonfinite": self.nonfinite,
            "seconds": round(self.seconds, 6),
        } | ({} if self.watched is None else {WATCHED: dict(self.watched)})
