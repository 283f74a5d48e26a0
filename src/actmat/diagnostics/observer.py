"""Measure an item while it is merged: split the method's input into logical matrices and measure each.

An elementwise method receives chunks of any size: they are buffered until a matrix is complete.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.layer_names import split_layer
from actmat.diagnostics.measure import against_base, measure_dense, measure_lowrank
from actmat.diagnostics.model import MatrixRow
from actmat.engine.method import generator_for
from actmat.engine.observer import ObservedMerge
from actmat.linalg.lowrank import LowRank
from actmat.planning.model import Item
from actmat.planning.regions import Region, cut, matrix_label


class ItemObserver:
    """Implements `engine.observer.Observer`. The recipe's seed is for the probes."""

    def __init__(self, item: Item, *, seed: int) -> None:
        assert item.call is not None
        self.name, self.call = item.name, item.call
        self._item, self._seed = item, seed
        self._regions = [] if item.is_module else cut(item.shape, item.layout, "matrix")
        self._next = 0
        self._buffers: list[Tensor] = []
        self._measures: list[dict[str, Any]] = []

    def region(self, merged: ObservedMerge) -> None:
        """Measure complete matrices; buffer partial ones."""
        if isinstance(merged.value, LowRank):
            self._measure_module(merged, merged.value)
        elif merged.factors is not None:
            self._measure_factors(merged, merged.value, merged.factors)
        else:
            self._gather(merged, merged.value)

    def finish(self) -> dict[str, Any]:
        """Measures of matrices."""
        return {"measures": self._measures}

    def _add(self, label: str, shape: Sequence[int], numbers: Mapping[str, Any]) -> None:
        if not any(numbers["norms"]):
            return
        layer = split_layer(self.name)
        fields = {"snr": None, "relative_norms": None, **numbers}
        measure = MatrixRow(self.name, label, layer and layer[1], (shape[0], shape[1]), **fields)
        self._measures.append(dataclasses.asdict(measure))

    def _measure_module(self, merged: ObservedMerge, value: LowRank) -> None:
        """Measure one map of a module, or each of a stack."""
        assert merged.factors is not None
        label, stacked = merged.region.label, len(value.shape) > 2
        for index in range(math.prod(value.shape[:-2])):
            mine = f"{index}/{label}" if label else str(index)
            deltas = [_member(d, index) for d in merged.factors[0]]
            numbers = measure_lowrank(deltas, _member(value, index), scale=self.call.scale)
            self._add(mine if stacked else label, value.shape[-2:], numbers)

    def _gather(self, seen: ObservedMerge, value: Tensor) -> None:
        """Match the region with the matrices that it covers, wholly or partly."""
        flat = [*(d.reshape(-1) for d in seen.deltas), value, seen.stored]
        start = seen.region.start
        while start < seen.region.stop:
            region = self._regions[self._next]
            stop = min(region.stop, seen.region.stop)
            here = slice(start - seen.region.start, stop - seen.region.start)
            whole = start == region.start and stop == region.stop
            if not whole:
                if not self._buffers:
                    self._buffers = [x.new_empty(region.numel) for x in flat]
                for buffer, x in zip(self._buffers, flat, strict=True):
                    buffer[start - region.start : stop - region.start].copy_(x[here])
            if stop == region.stop:
                self._measure_dense(region, [x[here] for x in flat] if whole else self._buffers, seen)
                self._buffers = []
                self._next += 1
            start = stop

    def _measure_dense(self, region: Region, flat: Sequence[Tensor], seen: ObservedMerge) -> None:
        *deltas, merged, base = ([*region.layout.to_matrices(x.view(region.shape))] for x in flat)
        for k, merged_OI in enumerate(merged):
            if merged_OI.ndim != 2:
                continue
            label = matrix_label(region, k)
            numbers = measure_dense(
                [d[k] for d in deltas],
                merged_OI,
                scale=self.call.scale,
                generator=generator_for(self._seed, self.name, f"probes {label}"),
            )
            beside = against_base(numbers["norms"], merged_OI.numel(), _norm(base[k]), self._eps())
            self._add(label, merged_OI.shape, numbers | beside)

    def _measure_factors(self, seen: ObservedMerge, value: Tensor, factors: Sequence[Sequence[LowRank]]) -> None:
        region = seen.region
        merged = region.layout.to_matrices(value.view(region.shape))
        base = region.layout.to_matrices(seen.stored.view(region.shape))
        for k, deltas in enumerate(factors):
            label = matrix_label(region, k)
            numbers = measure_lowrank(deltas, merged[k], scale=self.call.scale)
            beside = against_base(numbers["norms"], merged[k].numel(), _norm(base[k]), None)
            self._add(label, merged[k].shape, numbers | beside)

    def _eps(self) -> list[float]:
        """eps of the coarser of the base's and the expert's dtype, per expert."""
        mine = torch.finfo(torch_dtype(self._item.base_dtype)).eps
        return [max(mine, torch.finfo(torch_dtype(d)).eps) for d in self._item.expert_dtypes]


def _member(delta: LowRank, index: int) -> LowRank:
    return LowRank(delta.b_OR.flatten(0, -3)[index], delta.a_RI.flatten(0, -3)[index]) if delta.b_OR.ndim > 2 else delta


def _norm(tensor: Tensor) -> float:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(tensor.to(wide)))
