"""Inner products and weighted sums of whole tensors, in pieces that stay in the cache.

Rules that look at a tensor as one long vector (slerp, Karcher mean, Model Stock) need nothing but the `T x T` matrix
of inner products and one weighted sum: two passes over memory, whatever they compute in between.
Shapes: `T` tensors of equal shape, `L` entries of a piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from actmat.linalg.places import PLACE

__all__ = ["PIECE", "frobenius_norm64", "inner_products", "inner_workspace", "one_pass_sum", "weighted_sum"]

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


def frobenius_norm64(tensor: Tensor) -> float:
    """`||X||_F` over all entries, summed in float64 without a float64 copy of the whole tensor."""
    rows = tensor if tensor.ndim > 1 else tensor.reshape(1, -1) if tensor.numel() <= PIECE else tensor.unsqueeze(-1)
    step = max(1, PIECE * rows.shape[0] // max(rows.numel(), 1))
    pieces = (rows[start : start + step] for start in range(0, rows.shape[0], step))
    return math.sqrt(sum(float(torch.linalg.vector_norm(p, dtype=torch.float64)) ** 2 for p in pieces))


def weighted_sum(tensors: Sequence[Tensor], coefficients: Sequence[float], out: Tensor | None = None) -> Tensor:
    """`sum_t c_t X_t` in a new tensor, or in `out` (contiguous); tensors whose coefficient is zero are not read."""
    if out is None:
        out = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
    into = out.view(-1)
    terms = [(c, x.reshape(-1)) for c, x in zip(coefficients, tensors, strict=True) if c != 0]
    for start in range(0, into.numel(), PLACE):
        piece = into[start : start + PLACE].zero_()
        for c, x in terms:
            piece.add_(x[start : start + PLACE], alpha=c)
    return out


def one_pass_sum(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """`sum_t w_t D_t` in a new tensor, each delta read once and one alive at a time: for sequences that read lazily."""
    out: Tensor | None = None
    for delta, weight in zip(deltas, weights, strict=True):
        if out is None:
            out = delta * weight
        else:
            out.add_(delta, alpha=weight)
    assert out is not None, "a merge has at least one expert"
    return out


def inner_workspace(entries: int, n_tensors: int) -> int:
    """Elements of float32 that `inner_products` and one `weighted_sum` hold at their peak, the sum included."""
    return entries + 2 * n_tensors * min(PIECE, max(1, entries))
