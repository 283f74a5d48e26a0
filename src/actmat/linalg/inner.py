"""Inner products and weighted sums of whole tensors, in pieces that stay in the cache.

Rules that look at a tensor as one long vector (slerp, Karcher mean, Model Stock) need nothing but the `T x T` matrix
of inner products and one weighted sum: two passes over memory, whatever they compute in between.
Shapes: `T` tensors of equal shape, `L` entries of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["PIECE", "inner_products", "weighted_sum"]

PIECE = 1 << 14
"""Entries per piece: a handful of float64 rows of this length fit a core's private cache."""


def inner_products(tensors: Sequence[Tensor]) -> Tensor:
    """`G[s, t] = <X_s, X_t>` over all entries, accumulated in float64 (`T x T`, on the CPU).

    float64 because angles between fine-tuned models are small: `1 - cos` near 1e-7 is lost in a float32 sum.
    """
    flat = [x.reshape(-1) for x in tensors]
    size = flat[0].numel()
    rows_TL = torch.empty((len(flat), min(PIECE, size)), dtype=torch.float64, device=flat[0].device)
    gram_TT = torch.zeros((len(flat), len(flat)), dtype=torch.float64, device=flat[0].device)
    for start in range(0, size, PIECE):
        piece_TL = rows_TL[:, : min(PIECE, size - start)]
        for row, x in zip(piece_TL, flat, strict=True):
            row.copy_(x[start : start + PIECE])
        gram_TT.addmm_(piece_TL, piece_TL.mT)
    return gram_TT.cpu()


def weighted_sum(coefficients: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """`sum_t c_t X_t` in a new tensor; tensors whose coefficient is exactly zero are not read."""
    out = torch.zeros_like(tensors[0], memory_format=torch.contiguous_format)
    into = out.view(-1)
    terms = [(c, x.reshape(-1)) for c, x in zip(coefficients, tensors, strict=True) if c != 0]
    for start in range(0, into.numel(), PIECE):
        piece = into[start : start + PIECE]
        for c, x in terms:
            piece.add_(x[start : start + PIECE], alpha=c)
    return out
