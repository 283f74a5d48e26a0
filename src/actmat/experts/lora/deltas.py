"""Deltas of LoRA on a base: `scaling * B A`, on the tensors that the base stores.

Shapes: `O` rows and `I` columns of a tensor as it is stored, `R` rank, `E` stacked experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.model import Model
from actmat.experts.fitted import FittedDeltas, FormedPart
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.apart import packed_product, put_rows
from actmat.experts.lora.fitting import Fit, ModulePart
from actmat.experts.untied import tied_parts
from actmat.layout.types import Block
from actmat.linalg.lowrank import LowRank


def fit_factors(adapter: Adapter, base: Model) -> FittedDeltas:
    """An adapter of factors on a base, which may be closed afterwards.

    Raises:
        CheckpointError: it does not fit; carries all problems.
    """
    shapes = {f"{module.inside}.weight": module.shape for module in adapter.modules.values()}
    tied = tied_parts(adapter, base, adapter.extras, shapes)
    chosen = {n: n for n, m in adapter.modules.items() if f"{m.inside}.weight" not in tied.refused}
    fit = Fit(adapter.renamed(chosen) if tied.refused else adapter, tied.base)
    formed = {name: _formed(adapter, pieces, tied.base.specs[name]) for name, pieces in fit.pieces.items()}
    deltas = FittedDeltas(adapter.origin or adapter, tied, formed, fit.full, fit.hidden, fit.problems)
    deltas.adapter = adapter
    left_out = [
        f"the base is not a {part}: the adapter's {count} modules of the {part} are left out"
        for part, count in fit.left_out.items()
    ]
    deltas.note(*adapter.listing.warnings, severity="warning")
    deltas.note(*adapter.notes, *left_out, *fit.notes, *tied.notes)
    return deltas


def _formed(adapter: Adapter, pieces: Sequence[ModulePart], spec: TensorSpec) -> FormedPart:
    """The delta of a tensor of the base from its pieces."""
    modules = [(p.module, p.bias) for p in pieces]
    names = [n for m, bias in modules for n in ([m.bias] if bias else [m.a, m.b, m.alpha]) if n is not None]
    names = [stored for name in names for stored in adapter.sources.get(name, (name,))]
    form = _bias if pieces[0].bias else _product
    return FormedPart(names, sum(0 if bias else m.rank for m, bias in modules), partial(form, adapter, pieces, spec))


def _product(adapter: Adapter, pieces: Sequence[ModulePart], spec: TensorSpec, dtype: torch.dtype) -> LowRank:
    """The factors on the stored tensor, `*batch O I`."""
    piece = pieces[0]
    if piece.rows:
        parts = [(adapter.factors(p.module, dtype), p.rows) for p in pieces]
        value = packed_product(parts, spec.shape[1] if piece.transposed else spec.shape[0])
    else:
        value = adapter.factors(piece.module, dtype)
    if piece.index is not None:
        value = LowRank(value.b_OR[piece.index], value.a_RI[piece.index])
    if piece.transposed:
        value = LowRank(value.a_RI.mT.contiguous(), value.b_OR.mT.contiguous())
    if piece.stop is not None:
        value = LowRank(value.b_OR[..., piece.start : piece.stop, :], value.a_RI)
    return value


def _bias(adapter: Adapter, pieces: Sequence[ModulePart], spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    """The delta of a bias, from all its pieces."""
    out = torch.zeros(spec.numel, 1, dtype=dtype)
    for piece in pieces:
        values = adapter.bias_delta(piece.module, dtype)
        assert values is not None, "only modules with a bias have such a piece"
        rows = piece.rows or (Block("all", 0, len(out)),)
        put_rows(out, values.flatten()[piece.start : piece.stop, None], rows)
    return out.flatten()
