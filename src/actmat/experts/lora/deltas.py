"""An adapter as an expert: the tensors of its base, with deltas where the adapter has them.

Shapes: `O` rows and `I` columns of a tensor as it is stored, `R` rank, `E` stacked experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actmat.checkpoints.model import Model
from actmat.experts.fitted import FittedDeltas
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.apart import packed_product, put_rows
from actmat.experts.lora.fitting import Fit
from actmat.experts.stored import with_notes
from actmat.layout.types import Block
from actmat.linalg.lowrank import LowRank

_SLAB = 1 << 22
"""Entries of a product that are formed at a time."""


class FactorDeltas(FittedDeltas):
    """`W_0 + scaling * B A` without the sum: `dense` gives the deltas, only tensors trained in full are stored.

    Args:
        adapter: the deltas; closed with the expert.
        base: of the deltas; may be closed afterwards.

    Raises:
        CheckpointError: it does not fit; carries all problems.
    """

    adapter: Adapter

    def __init__(self, adapter: Adapter, base: Model) -> None:
        deltas = {f"{module.inside}.weight": module.shape for module in adapter.modules.values()}
        super().__init__(adapter, base, adapter.extras, deltas)
        parts = self._parts
        fitted = {n: n for n, m in adapter.modules.items() if f"{m.inside}.weight" not in parts.refused}
        fit = Fit(adapter.renamed(fitted) if parts.refused else adapter, parts.base)
        self.adapter, self._pieces = adapter, fit.pieces
        left_out = [
            f"the base is not a {part}: the adapter's {count} modules of the {part} are left out"
            for part, count in fit.left_out.items()
        ]
        self.model = with_notes(adapter, *left_out, *fit.notes, *parts.notes)
        self._take(fit.full, fit.hidden, fit.problems)

    def dense(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Entries `start:stop` of the flattened delta of `name`; only the rows around them are formed."""
        if self.source(name).kind != "formed":
            return super().dense(name, start, stop, dtype)
        if self._pieces[name][0].bias:
            return self._bias(name, dtype)[start:stop]
        product = self._whole(name, dtype)
        assert isinstance(product, LowRank)
        return entries_of(product, start, stop)

    def _form(self, name: str, dtype: torch.dtype) -> LowRank:
        """The factors on the stored tensor, `*batch O I`."""
        pieces = self._pieces[name]
        if pieces[0].rows:
            shape = self._base.specs[name].shape
            parts = [(self.adapter.factors(p.module, dtype), p.rows) for p in pieces]
            value = packed_product(parts, shape[1] if pieces[0].transposed else shape[0])
        else:
            value = self.adapter.factors(pieces[0].module, dtype)
        piece = pieces[0]
        if piece.index is not None:
            value = LowRank(value.b_OR[piece.index], value.a_RI[piece.index])
        if piece.transposed:
            value = LowRank(value.a_RI.mT.contiguous(), value.b_OR.mT.contiguous())
        if piece.stop is not None:
            value = LowRank(value.b_OR[..., piece.start : piece.stop, :], value.a_RI)
        return value

    def _bias(self, name: str, dtype: torch.dtype) -> Tensor:
        """The delta of a bias, from all its pieces."""
        out = torch.zeros(self.specs[name].numel, 1, dtype=dtype)
        for piece in self._pieces[name]:
            found = self.adapter.bias_delta(piece.module, dtype)
            assert found is not None, "only modules with a bias have such a piece"
            rows = piece.rows or (Block("all", 0, len(out)),)
            put_rows(out, found.flatten()[piece.start : piece.stop, None], rows)
        return out.flatten()

    def _formed_of(self, name: str) -> tuple[Sequence[str], int] | None:
        if name not in self._pieces:
            return None
        modules = [(p.module, p.bias) for p in self._pieces[name]]
        names = [n for m, bias in modules for n in ([m.bias] if bias else [m.a, m.b, m.alpha]) if n is not None]
        return names, sum(0 if bias else m.rank for m, bias in modules)


def entries_of(product: LowRank, start: int, stop: int) -> Tensor:
    """Entries `start:stop` of the flattened product; only the rows around them are formed, a slab at a time."""
    rows, columns = product.shape[-2:]
    out = torch.empty(stop - start, dtype=product.b_OR.dtype)
    position = start
    while position < stop:
        expert, inside = divmod(position, rows * columns)
        first = inside // columns
        last = min(rows, first + max(1, _SLAB // columns), -(-(inside + stop - position) // columns))
        one = LowRank(product.b_OR[expert], product.a_RI[expert]) if product.b_OR.ndim == 3 else product
        slab = (one.b_OR[first:last] @ one.a_RI).flatten()
        found = slab[inside - first * columns :][: stop - position]
        out[position - start : position - start + found.numel()] = found
        position += found.numel()
    return out
