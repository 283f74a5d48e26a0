"""Watching one tensor while it is merged: cuts what the engine shows into logical matrices and measures each.

Matrices are measured; of other merged tensors (tables, norms, biases) only norms are taken. A rule on entries shows
pieces of any size: they are gathered until a matrix is whole.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.diagnostics.measure import Kept, against_base, measure_dense, measure_lowrank, tidy
from actmat.diagnostics.model import Measure
from actmat.diagnostics.sample import take_sample
from actmat.engine.apply import generator_for
from actmat.engine.watch import Seen
from actmat.linalg.interference.moments import Reduced
from actmat.linalg.interference.solver import State
from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method
from actmat.plan.adapter_model import ModulePlan
from actmat.plan.choose import depth_of
from actmat.plan.model import MethodCall, TensorPlan
from actmat.plan.parts import Part, cut

__all__ = ["ModuleWatch", "TensorWatch", "sums_plainly"]


def sums_plainly(call: MethodCall) -> bool:
    """Whether the rule's own `S` is `sum_t D_t^T D_t`: of the interference family, no weights, no other estimate."""
    method = get_method(call.method)
    return method.sums_own_grams(call.options) and all(w == 1.0 for w in call.weights or ())


class _Watch:
    """What watches of tensors and of modules share: rows of measures, what the rule noted, the time it took."""

    def __init__(self, name: str, role: str, call: MethodCall) -> None:
        self.name, self.role, self.call = name, role, call
        self.plain = sums_plainly(call)
        self._measures: list[dict[str, Any]] = []
        self._seconds = 0.0

    def _kept(self, stats: Mapping[str, Any], label: str) -> Kept | None:
        found = stats.get("parts", {}).get(label, {}) if label else stats
        if "cutoff" not in found or "rank" not in found:
            return None
        return Kept(int(found["rank"]), float(found["cutoff"]))

    def _add(self, label: str, shape: Sequence[int], factored: bool, numbers: Mapping[str, Any]) -> None:
        if not any(numbers["norms"]):
            return
        depth = depth_of(self.name)
        fields = {"snr": None, "relative_norms": None, **numbers}
        measure = Measure(self.name, label, depth, self.role, (shape[0], shape[1]), factored, **fields)
        self._measures.append(dataclasses.asdict(measure))


class TensorWatch(_Watch):
    """Implements `engine.watch.Watch` for a stored tensor.

    Args:
        item: its plan.
        seed: of the recipe, for the probes.
        exact: measure everything without probes.
    """

    def __init__(self, item: TensorPlan, seed: int, *, exact: bool = False) -> None:
        assert item.call is not None
        super().__init__(item.name, str(item.layout.role), item.call)
        self._item, self._seed, self._exact = item, seed, exact
        self._pieces = cut(item.shape, item.layout, "matrix") if item.layout.role.is_matrix else []
        self._next = 0
        self._buffers: list[Tensor] = []
        self._sample: dict[str, Any] = {}
        self._squares = [0.0] * len(item.sources)
        self._base_square = self._merged_square = 0.0

    def part(self, seen: Seen) -> None:
        """Measure what is whole, gather what is not."""
        began = time.perf_counter()
        if not self._sample and seen.factors is None:
            self._sample = take_sample(self._item, seen)
        if not self._pieces:
            self._add_norms(seen)
        elif seen.factors is not None:
            self._factors(seen, seen.factors)
        else:
            self._walk(seen)
        self._seconds += time.perf_counter() - began

    def factored(self, label: str, deltas: Sequence[LowRank], merged: LowRank, stats: Mapping[str, Any]) -> None:
        """Modules of adapters have watches of their own."""
        raise TypeError(f"'{self.name}' is a stored tensor")

    def finish(self) -> dict[str, Any]:
        """Measures, or norms; what the sample showed; the time taken."""
        out: dict[str, Any] = {"measures": self._measures, "seconds": round(self._seconds, 6)}
        if self._sample:
            out["sample"] = self._sample
        if not self._pieces:
            out["norms"] = [tidy(math.sqrt(s)) for s in self._squares]
            out["base_norm"] = tidy(math.sqrt(self._base_square))
            out["merged_norm"] = tidy(math.sqrt(self._merged_square) * abs(self.call.scale))
        return out

    def _add_norms(self, seen: Seen) -> None:
        for t, delta in enumerate(seen.deltas):
            self._squares[t] += _square(delta)
        self._base_square += _square(seen.base.to(seen.merged.dtype))
        self._merged_square += _square(seen.merged)

    def _walk(self, seen: Seen) -> None:
        """Match the part with the pieces that it covers, wholly or in part."""
        flat = [*(d.reshape(-1) for d in seen.deltas), seen.merged, seen.base]
        start = seen.part.start
        while start < seen.part.stop:
            piece = self._pieces[self._next]
            stop = min(piece.stop, seen.part.stop)
            here = slice(start - seen.part.start, stop - seen.part.start)
            whole = start == piece.start and stop == piece.stop
            if not whole:
                if not self._buffers:
                    self._buffers = [x.new_empty(piece.numel) for x in flat]
                for buffer, x in zip(self._buffers, flat, strict=True):
                    buffer[start - piece.start : stop - piece.start].copy_(x[here])
            if stop == piece.stop:
                self._dense(piece, [x[here] for x in flat] if whole else self._buffers, seen)
                self._buffers = []
                self._next += 1
            start = stop

    def _dense(self, piece: Part, flat: Sequence[Tensor], seen: Seen) -> None:
        *deltas, merged, base = ([*piece.layout.to_matrices(x.view(piece.shape))] for x in flat)
        for k, merged_OI in enumerate(merged):
            if merged_OI.ndim != 2:
                continue
            label = _label(piece, k)
            seed = None if self._exact else generator_for(self._seed, self.name, f"probes {label}")
            rule = self._reduced(seen, k)
            numbers = measure_dense(
                [d[k] for d in deltas],
                merged_OI,
                scale=self.call.scale,
                generator=seed,
                kept=self._kept(seen.stats, label) if rule is not None else None,
                rule=rule,
                plain=self.plain,
            )
            beside = against_base(numbers["norms"], merged_OI.numel(), _norm(base[k]), self._eps())
            self._add(label, merged_OI.shape, False, numbers | beside)

    def _factors(self, seen: Seen, factors: Sequence[Sequence[LowRank]]) -> None:
        piece = seen.part
        merged = piece.layout.to_matrices(seen.merged.view(piece.shape))
        base = piece.layout.to_matrices(seen.base.view(piece.shape))
        for k, deltas in enumerate(factors):
            label = _label(piece, k)
            kept = self._kept(seen.stats, label)
            numbers = measure_lowrank(deltas, merged[k], scale=self.call.scale, kept=kept, plain=self.plain)
            beside = against_base(numbers["norms"], merged[k].numel(), _norm(base[k]), None)
            self._add(label, merged[k].shape, True, numbers | beside)

    def _reduced(self, seen: Seen, k: int) -> Reduced | None:
        """What the rule solved for logical matrix `k` of the part, where it belongs to the interference family."""
        method = get_method(self.call.method)
        if method.stages is None or not seen.states:
            return None
        state = seen.states.get((method.stages.key(self.call.options), str(self.call.weights), k))
        return state.items[0] if isinstance(state, State) and len(state.items) == 1 else None

    def _eps(self) -> list[float]:
        """eps of the coarser of the base's and the expert's dtype, per expert."""
        mine = torch.finfo(torch_dtype(self._item.base_dtype)).eps
        return [max(mine, torch.finfo(torch_dtype(d)).eps) for d in self._item.expert_dtypes]


class ModuleWatch(_Watch):
    """Implements `engine.watch.Watch` for a module of adapters that merge into an adapter."""

    def __init__(self, item: ModulePlan) -> None:
        super().__init__(item.name, item.kind, item.call)

    def part(self, seen: Seen) -> None:
        """Stored tensors have watches of their own."""
        raise TypeError(f"'{self.name}' is a module of an adapter")

    def factored(self, label: str, deltas: Sequence[LowRank], merged: LowRank, stats: Mapping[str, Any]) -> None:
        """Measure one map, or each of a stack."""
        began = time.perf_counter()
        kept = self._kept(stats, "")
        for index in range(math.prod(merged.shape[:-2])):
            mine = f"{index}/{label}" if label and len(merged.shape) > 2 else str(index)
            numbers = measure_lowrank(
                [_item(d, index) for d in deltas],
                _item(merged, index),
                scale=self.call.scale,
                kept=kept if len(merged.shape) == 2 else None,
                plain=self.plain,
            )
            self._add(label if len(merged.shape) == 2 else mine, merged.shape[-2:], True, numbers)
        self._seconds += time.perf_counter() - began

    def finish(self) -> dict[str, Any]:
        """Measures, and the time they took."""
        return {"measures": self._measures, "seconds": round(self._seconds, 6)}


def _item(delta: LowRank, index: int) -> LowRank:
    return LowRank(delta.b_OR.flatten(0, -3)[index], delta.a_RI.flatten(0, -3)[index]) if delta.b_OR.ndim > 2 else delta


def _label(part: Part, k: int) -> str:
    blocks = part.layout.blocks
    return "/".join(x for x in (part.label, blocks[k].name if blocks else "") if x)


def _norm(tensor: Tensor) -> float:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(tensor.to(wide)))


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2
