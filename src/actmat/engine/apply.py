"""Apply the rule of one variant to one part: hand it what it needs, split and join matrices, cap, check."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.engine.naming import named_errors
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.engine.variant import Variant
from actmat.errors import NumericalError
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.caps import cap_delta, cap_lowrank
from actmat.methods import Merged
from actmat.plan.parts import Part, cut

__all__ = ["apply_rule", "checked_finite", "generator_for", "narrowed", "note"]

_ALIGNMENT = 64
"""Bytes: what torch's CPU allocator gives every new tensor."""


def apply_rule(
    variant: Variant,
    part: Part,
    deltas: Sequence[Tensor],
    base_raw: Tensor | StreamedBase,
    reader: TensorReader,
    states: dict[Any, Any],
) -> Tensor:
    """Merged delta of one part, flat, in the compute dtype. `states`: first stages that variants share.

    `base_raw` is streamed for a rule that does not look at it alone.

    Raises:
        NumericalError, RecipeError: from the rule, with the name of the tensor.
    """

    def call(deltas: Sequence[Tensor], label: str, index: int) -> Merged:
        return _call(variant, deltas, _needs(variant, label, index, part, base_raw, reader), index, states)

    with named_errors("tensor", variant.item.name, variant.call.method):
        if variant.method.acts_on != "matrix":
            merged = call(deltas, part.label, 0)
            if variant.method.acts_on == "tensor":
                note(variant, part.label, merged.stats)
            value = _cap_pieces(variant, merged.value, deltas, part)
        elif variant.item.factored:
            value = _merge_factored(variant, part, reader)
        else:
            value = _merge_matrices(variant, part, deltas, call)
        return checked_finite(value.reshape(-1), variant)


def _merge_matrices(
    variant: Variant, part: Part, deltas: Sequence[Tensor], call: Callable[[Sequence[Tensor], str, int], Merged]
) -> Tensor:
    count = len(part.layout.matrix_shapes(part.shape))
    split = [part.layout.to_matrices(d) for d in deltas] if count > 1 else None
    values = []
    for k in range(count):
        if split is not None:
            matrices: Sequence[Tensor] = [s[k] for s in split]
        else:  # deltas that are read when they are asked for lie over one another: one matrix at a time
            matrices = deltas if _is_single(part) else _OneMatrix(deltas, part.layout)
        label = _label(part, k)
        merged = call(matrices, label, k)
        note(variant, label, merged.stats)
        values.append(_cap(variant, merged.value, matrices, part.layout, label))
    return part.layout.from_matrices(values, part.shape)


class _OneMatrix(Sequence[Tensor]):
    """The only matrix of each delta, made when it is asked for."""

    def __init__(self, deltas: Sequence[Tensor], layout: TensorLayout) -> None:
        self._deltas = deltas
        self._layout = layout

    def __len__(self) -> int:
        return len(self._deltas)

    def __getitem__(self, t: int) -> Tensor:  # type: ignore[override]  # slices have no use here
        return self._layout.to_matrices(self._deltas[t])[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[t] for t in range(len(self)))


def _merge_factored(variant: Variant, part: Part, reader: TensorReader) -> Tensor:
    """The same from the factors of adapters, by the rule's low-rank form; multiplied out once."""
    method, call = variant.method, variant.call
    assert method.merge_lowrank is not None, "the plan saw to it"
    values = []
    for k, deltas in enumerate(reader.factors(part)):
        label = _label(part, k)
        needs: dict[str, Any] = {"weights": call.weights} if method.is_weighted else {}
        if method.is_random:
            needs["generator"] = generator_for(variant.seed, variant.item.name, label or str(part.start))
        if "survey" in method.needs:
            needs["survey"] = variant.survey
        if method.needs_statistics and variant.statistics is not None:
            needs["statistics"] = variant.statistics.of_part(method, variant.item, part, k, torch.float64)
        merged = method.merge_lowrank(deltas, **needs, **call.options)
        note(variant, label, merged.stats)
        value = merged.value
        if (caps := variant.postprocess).caps:
            value, stats = cap_lowrank(
                value, deltas, norm_cap=caps.norm_cap, singular_value_cap=caps.singular_value_cap
            )
            note(variant, label, stats)
        values.append(value.dense().to(reader.compute_dtype))
    return part.layout.from_matrices(values, part.shape)


def checked_finite(value: Tensor, variant: Variant) -> Tensor:
    """The same value.

    Raises:
        NumericalError: not all of it is finite.
    """
    # a sum is finite if every entry is (or it overflows): one cheap pass, an exact one only then
    if not bool(torch.isfinite(value.sum())) and not bool(torch.isfinite(value).all()):
        raise NumericalError(
            f"gave NaN or Inf for finite deltas, with options {dict(variant.call.options)}. Likely cause: options out "
            "of proportion to the deltas, or deltas whose squares overflow; try --compute-dtype float64, other "
            "options, or another method for this tensor"
        )
    return value


def _is_single(part: Part) -> bool:
    layout = part.layout
    return not layout.blocks and layout.orientation == "OI" and len(part.shape) == 2


def _needs(
    variant: Variant, label: str, index: int, part: Part, base_raw: Tensor | StreamedBase, reader: TensorReader
) -> dict[str, Any]:
    """What the rule takes beside deltas and options, for matrix `index` of the part."""
    method, call = variant.method, variant.call
    needs: dict[str, Any] = {}
    if method.is_weighted:
        needs["weights"] = call.weights
    if method.uses_base(call.options):
        assert isinstance(base_raw, Tensor)
        whole = reader.converted_base(part, base_raw)
        needs["base"] = part.layout.to_matrices(whole)[index] if method.acts_on == "matrix" else whole
    if method.is_random:
        needs["generator"] = generator_for(variant.seed, variant.item.name, label or str(part.start))
    if "survey" in method.needs:
        needs["survey"] = variant.survey
    if method.needs_statistics and variant.statistics is not None:
        given = variant.statistics.of_part(method, variant.item, part, index, reader.compute_dtype, reader.device)
        needs["statistics"] = given
    return needs


def _call(
    variant: Variant, deltas: Sequence[Tensor], needs: Mapping[str, Any], index: int, states: dict[Any, Any]
) -> Merged:
    method, call = variant.method, variant.call
    if method.stages is None:
        return method.merge(deltas, **needs, **call.options)
    key = (method.stages.key(call.options), str(call.weights), index)
    if key not in states:
        states[key] = method.stages.prepare(deltas, **needs, **call.options)
    return method.stages.finish(states[key], **needs, **call.options)


def _cap_pieces(variant: Variant, merged: Tensor, deltas: Sequence[Tensor], part: Part) -> Tensor:
    """Caps for a rule that knows no matrices: they hold for each matrix of the tensor all the same."""
    if not variant.postprocess.caps:
        return merged
    out = torch.empty_like(merged).reshape(-1)
    for piece in cut(part.shape, part.layout, "matrix"):
        value, *own = (piece.layout.to_matrices(narrowed(x, piece).view(piece.shape)) for x in (merged, *deltas))
        capped = [
            _cap(variant, matrix, [matrices[k] for matrices in own], piece.layout, _label(piece, k))
            for k, matrix in enumerate(value)
        ]
        out[piece.start : piece.stop].copy_(piece.layout.from_matrices(capped, piece.shape).reshape(-1))
    return out.view(merged.shape)


def _cap(variant: Variant, merged: Tensor, deltas: Sequence[Tensor], layout: TensorLayout, label: str) -> Tensor:
    """Caps on one matrix; a table of vectors has no singular values worth the name, so only its norm is capped."""
    caps = variant.postprocess
    if not caps.caps:
        return merged
    is_matrix = layout.role.is_matrix or layout.role is Role.CONVOLUTION
    limit = caps.singular_value_cap if is_matrix else None
    value, stats = cap_delta(merged, deltas, norm_cap=caps.norm_cap, singular_value_cap=limit)
    note(variant, label, stats)
    return value


def _label(part: Part, k: int) -> str:
    blocks = part.layout.blocks
    return "/".join(x for x in (part.label, blocks[k].name if blocks else "") if x)


def note(variant: Variant, label: str, stats: Mapping[str, Any]) -> None:
    """Keep what a rule told of a part with this label for the record of the tensor."""
    if not stats:
        return
    if label:
        variant.stats.setdefault("parts", {}).setdefault(label, {}).update(stats)
    else:
        variant.stats.update(stats)


def generator_for(seed: int, name: str, label: str) -> torch.Generator:
    """A generator of its own for every tensor and part: order, threads and shards change nothing."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{label}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def narrowed(whole: Tensor, own: Part) -> Tensor:
    """The part's entries of a whole tensor; at an aligned address, on which the last bits of a BLAS may depend."""
    piece = whole.reshape(-1)[own.start : own.stop]
    return piece if piece.data_ptr() % _ALIGNMENT == 0 else piece.clone()
