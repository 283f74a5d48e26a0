"""Merge one tensor: read, apply the rule of every variant, add to the base, cast, write.

Several variants (methods, options) of one merge share the reading, and those of one family share the first stage
of the computation.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.writer import TensorSink
from actmat.engine.deltas import Findings, TensorReader
from actmat.errors import NumericalError
from actmat.linalg.caps import cap_delta
from actmat.methods import Merged, MergeMethod, get_method
from actmat.methods.contract import ActsOn
from actmat.plan.model import MethodCall, TensorPlan
from actmat.plan.parts import CHUNK, Part, cut
from actmat.recipe import Postprocess

__all__ = ["TensorRecord", "Variant", "generator_for", "merge_tensor"]


@dataclass
class Variant:
    """One output of a tensor: what its plan asks for, where its bytes go, what the survey found."""

    item: TensorPlan
    sink: TensorSink
    seed: int
    postprocess: Postprocess
    survey: Any = None
    stats: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def call(self) -> MethodCall:
        """The rule; only for items that have one."""
        assert self.item.call is not None
        return self.item.call

    @property
    def method(self) -> MergeMethod:
        """Declaration of the rule."""
        return get_method(self.call.method)


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
        }


def merge_tensor(variants: Sequence[Variant], reader: TensorReader, findings: Findings) -> list[TensorRecord]:
    """Do one tensor for all variants; all of them have a rule. Records come in the order of the variants."""
    began = time.perf_counter()
    item = variants[0].item
    changed_anywhere = False
    for part in cut(item.shape, item.layout, _coarsest([v.method.acts_on for v in variants])):
        base_raw = reader.read_base(part)
        deltas = reader.deltas(part, base_raw)
        if findings.fatal:  # nothing of this merge will be kept: read on only to find the other bad values
            for _ in deltas:
                pass
            continue
        lazy = len(variants) == 1 and variants[0].method.one_pass and not _several_matrices(variants[0], part)
        held: Sequence[Tensor] = deltas if lazy else list(deltas)
        merged = _apply_all(variants, part, held, base_raw, reader)
        changed_anywhere |= deltas.changed
        for variant, value in zip(variants, merged, strict=True):
            _write(variant, part, base_raw, value if deltas.changed else None, reader)
    if findings.fatal:
        return []
    base_hash, expert_hashes = reader.hashes()
    share = (time.perf_counter() - began) / len(variants)
    return [
        TensorRecord(
            name=item.name,
            hash=v.sink.digest,
            base_hash=base_hash,
            expert_hashes=expert_hashes,
            stats=v.stats,
            unchanged=not changed_anywhere,
            nonfinite=findings.count(item.name),
            seconds=share,
        )
        for v in variants
    ]


def _coarsest(kinds: Sequence[ActsOn]) -> ActsOn:
    """The cut that suits all variants: a rule on entries can work on any part, a matrix rule on a whole tensor."""
    return next(k for k in ("tensor", "matrix", "elementwise") if k in kinds)


def _several_matrices(variant: Variant, part: Part) -> bool:
    return variant.method.acts_on == "matrix" and len(part.layout.matrix_shapes(part.shape)) > 1


def _apply_all(
    variants: Sequence[Variant], part: Part, deltas: Sequence[Tensor], base_raw: Tensor, reader: TensorReader
) -> list[Tensor]:
    """Merged delta of each variant, flat, in the compute dtype, on the CPU."""
    states: dict[Any, Any] = {}
    out = []
    for variant in variants:
        if variant.method.acts_on == "matrix":
            split = [part.layout.to_matrices(d) for d in deltas] if not _is_single(part) else None
            shapes = part.layout.matrix_shapes(part.shape)
            values = []
            for k in range(len(shapes)):
                matrices = deltas if split is None else [s[k] for s in split]
                label = _label(part, k)
                merged = _apply(variant, matrices, label, k, part, base_raw, reader, states)
                values.append(_post(variant, merged, matrices).value)
                _note(variant, label, merged)
            value = part.layout.from_matrices(values, part.shape)
        else:
            merged = _apply(variant, deltas, part.label, 0, part, base_raw, reader, states)
            value = _post(variant, merged, deltas).value
            if variant.method.acts_on == "tensor":
                _note(variant, part.label, merged)
        out.append(value.reshape(-1))
    return out


def _is_single(part: Part) -> bool:
    layout = part.layout
    return not layout.blocks and layout.orientation == "OI" and len(part.shape) == 2


def _apply(
    variant: Variant,
    deltas: Sequence[Tensor],
    label: str,
    index: int,
    part: Part,
    base_raw: Tensor,
    reader: TensorReader,
    states: dict[Any, Any],
) -> Merged:
    method, call = variant.method, variant.call
    needs: dict[str, Any] = {}
    if method.is_weighted:
        needs["weights"] = call.weights
    if method.needs_base:
        whole = base_raw.to(reader.compute_dtype).view(part.shape).to(reader.device)
        needs["base"] = part.layout.to_matrices(whole)[index] if method.acts_on == "matrix" else whole
    if method.is_random:
        needs["generator"] = generator_for(variant.seed, variant.item.name, label or str(part.start))
    if "survey" in method.needs:
        needs["survey"] = variant.survey
    if method.stages is None:
        return method.merge(deltas, **needs, **call.options)
    key = (method.stages.key(call.options), str(call.weights), index)
    if key not in states:
        states[key] = method.stages.prepare(deltas, **needs, **call.options)
    return method.stages.finish(states[key], **needs, **call.options)


def _post(variant: Variant, merged: Merged, deltas: Sequence[Tensor]) -> Merged:
    caps = variant.postprocess
    if caps.norm_cap is None and caps.singular_value_cap is None:
        return merged
    value, stats = cap_delta(merged.value, deltas, norm_cap=caps.norm_cap, singular_value_cap=caps.singular_value_cap)
    variant.stats.update(stats)
    return Merged(value, merged.stats)


def _label(part: Part, k: int) -> str:
    blocks = part.layout.blocks
    return "/".join(x for x in (part.label, blocks[k].name if blocks else "") if x)


def _note(variant: Variant, label: str, merged: Merged) -> None:
    if not merged.stats:
        return
    if label:
        variant.stats.setdefault("parts", {})[label] = dict(merged.stats)
    else:
        variant.stats.update(merged.stats)


def generator_for(seed: int, name: str, label: str) -> torch.Generator:
    """A generator of its own for every tensor and part: order, threads and shards change nothing."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{label}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _write(variant: Variant, part: Part, base_raw: Tensor, delta: Tensor | None, reader: TensorReader) -> None:
    """`W_0 + scale * D*` in the output dtype, piece by piece; no delta at all keeps the base's bits.

    Sums and casts land in warm buffers: allocating for every piece would cost as much as the arithmetic.
    """
    out_dtype = torch_dtype(variant.item.out_dtype)
    for low in range(0, base_raw.numel(), CHUNK):
        piece = base_raw[low : low + CHUNK]
        if delta is not None:
            change = delta[low : low + CHUNK].to("cpu")
            merged = reader.scratch.take("merged", piece.numel(), reader.compute_dtype)
            wide = reader.wide_base(part.start + low, piece)
            piece = torch.add(wide, change, alpha=variant.call.scale, out=merged)
        if piece.dtype != out_dtype:
            piece = reader.scratch.take("out", piece.numel(), out_dtype).copy_(piece)
            if out_dtype == torch.float16 and not bool(torch.isfinite(piece).all()):
                raise NumericalError(
                    f"tensor '{variant.item.name}' has values beyond float16's range (65504) after merging with "
                    f"'{variant.call.method}'; write with --dtype bfloat16 or float32, or lower the scale"
                )
        variant.sink.write(raw_bytes(piece))
