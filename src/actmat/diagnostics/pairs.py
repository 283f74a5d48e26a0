"""Entry-wise comparison of deltas: inner products, and the share of entries where two deltas have opposite signs.

    inner[s, t] = <D_s, D_t>        conflict[s, t] = #(D_s D_t < 0) / #(D_s D_t != 0)

Norms, cosines, and the norms of the sum and the mean follow from `inner`. Exact up to rounding; signs are counted in
at most `COUNTED` entries, in chunks evenly spread over the matrix.

Shapes: `T` experts, `L` entries of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 14
"""Entries per chunk: a handful of rows of this length stay in a core's cache."""

COUNTED = 1 << 18
"""Entries in which signs are compared; a share counted in so many is off by less than 0.004 (four deviations)."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """`T x T` matrices, float64, on the CPU; `conflict_TT` is 0 where two experts share no entry."""

    inner_TT: Tensor
    conflict_TT: Tensor


def pairs(deltas: Sequence[Tensor]) -> Pairs:
    """Compare all pairs of deltas, reading each once.

    Products are summed in the dtype of the deltas within a chunk and in float64 beyond it.

    >>> found = pairs([torch.tensor([1.0, 2.0]), torch.tensor([1.0, -2.0])])
    >>> found.inner_TT.tolist(), found.conflict_TT[0, 1].item()
    ([[5.0, -3.0], [-3.0, 5.0]], 0.5)
    """
    flat = [_flat(d) for d in deltas]
    size, count = flat[0].numel(), len(flat)
    rows_TL = flat[0].new_empty(count, min(CHUNK, max(size, 1)))
    inner = torch.zeros(count, count, dtype=torch.float64, device=rows_TL.device)
    signed, both = torch.zeros_like(inner), torch.zeros_like(inner)
    chunks = -(-size // CHUNK)
    stride = max(1, -(-chunks // (COUNTED // CHUNK)))
    for number in range(chunks):
        low = number * CHUNK
        chunk_TL = rows_TL[:, : min(CHUNK, size - low)]
        for row, x in zip(chunk_TL, flat, strict=True):
            row.copy_(x[low : low + CHUNK])
        inner += chunk_TL @ chunk_TL.mT
        if number % stride == 0:
            sign_TL = chunk_TL.sign()
            signed += sign_TL @ sign_TL.mT
            moved_TL = sign_TL.abs_()
            both += moved_TL @ moved_TL.mT
    conflict = torch.where(both > 0, (both - signed) / (2 * both).clamp_min(1), 0.0)
    return Pairs(inner.cpu(), conflict.cpu())


def cosines(inner_TT: Tensor) -> Tensor:
    """`<D_s, D_t> / (||D_s|| ||D_t||)`; 0 where a delta is zero.

    >>> cosines(torch.tensor([[4.0, 1.0], [1.0, 1.0]])).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    return normalised(inner_TT).clamp(-1, 1)


def normalised(products_TT: Tensor) -> Tensor:
    """`x_st / sqrt(x_ss x_tt)`; 0 where one of them is zero."""
    root_T = products_TT.diagonal().clamp_min(0).sqrt()
    scale = root_T.unsqueeze(0) * root_T.unsqueeze(1)
    return torch.where(scale > 0, products_TT / scale.where(scale > 0, 1.0), 0.0)


def _flat(delta: Tensor) -> Tensor:
    """All entries in the order of storage, without a copy if the delta or its transpose is contiguous."""
    return delta.mT.reshape(-1) if not delta.is_contiguous() and delta.mT.is_contiguous() else delta.reshape(-1)
