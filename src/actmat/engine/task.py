"""One output of one item while it is merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from actmat.checkpoints.base import torch_dtype
from actmat.engine.observer import Observer, Writer
from actmat.linalg.lapack import retry_stats
from actmat.methods import MergeMethod, get_method
from actmat.planning.item import Item, MethodCall
from actmat.planning.model import MergePlan
from actmat.planning.regions import Region
from actmat.planning.work import regions_of


@dataclass
class Task:
    """One output of one item.

    Args:
        plan, item: what is wanted.
        writer: receives the output's bytes.
        survey: result of the method's survey of the whole model, if it has one.
        observer: measures the merge, if requested.
        stats: what the method reported so far.
    """

    plan: MergePlan
    item: Item
    writer: Writer | None
    survey: Any = None
    observer: Observer | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def call(self) -> MethodCall:
        """The method with its options; only for items that have one."""
        assert self.item.call is not None
        return self.item.call

    @property
    def method(self) -> MergeMethod:
        """Declaration of the method."""
        return get_method(self.call.method)

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of deltas and methods."""
        return torch_dtype(self.plan.recipe.compute_dtype)

    @property
    def merges(self) -> bool:
        """True if a method is called; else the base is copied."""
        return self.item.call is not None

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The regions that the method is called on, in storage order."""
        return regions_of(self.item)

    def note(self, label: str, stats: Mapping[str, Any]) -> None:
        """Keep the method's numbers on the region with this label."""
        if not stats:
            return
        if label:
            regions = self.stats.setdefault("parts", {})
            regions[label] = join_stats(regions.get(label, {}), stats)
        else:
            self.stats = join_stats(self.stats, stats)


def join_stats(stats: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Join the numbers of two records; retries are listed for both."""
    retries = [name for part in (stats, more) if "retries" in part for name in part["retries"].split(", ")]
    return {**stats, **more, **retry_stats(retries)}
