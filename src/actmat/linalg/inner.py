"""Inner products and weighted sums of whole tensors, in pieces that stay in the cache.

Rules that look at a tensor as one long vector (slerp, Karcher mean, Model Stock) need nothing but the `T x T` matrix
of inner products and one weighted sum: two passes over memory, whatever they compute in between.
Shapes: `T` tensors of equal shape, `P` entries of a place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from actmat.linalg.places import PLACE, empty_result, walk

__all__ = ["PIECE", "frobenius_norm64", "inner_products", "inner_workspace", "one_pass_sum", "weighted_sum"]

PIECE = 1 << 14
"""Entries per piece: a handful of float64 rows of this length fit a core's private cache."""


def inner_products(tensors: Sequence[Tensor]) -> Tensor:
    """`G[s, t] = <X_s, X_t>` over all entries, accumulated in float64 (`T x T`, on the CPU); one walk.

    float64 because angles between fine-tuned models are small: `1 - cos` near 1e-7 is lost in a float32 sum.
    """
    gram_TT = rows_TP = None
    for _, pieces_TP in walk(tensors):
        if gram_TT is None or rows_TP is None:
            count, like_P = len(pieces_TP), pieces_TP[0]
            rows_TP = torch.empty((count, like_P.numel()), dtype=torch.float64, device=like_P.device)
            gram_TT = torch.zeros((count, count), dtype=torch.float64, device=like_P.device)
        place_TP = rows_TP[:, : pieces_TP[0].numel()]
        for row_P, piece_P in zip(place_TP, pieces_TP, strict=True):
            row_P.copy_(piece_P)
        gram_TT.addmm_(place_TP, place_TP.mT)
    return torch.zeros((len(tensors), len(tensors)), dtype=torch.float64) if gram_TT is None else gram_TT.cpu()


def frobenius_norm64(tensor: Tensor) -> float:
    """`||X||_F` over all entries, summed in float64 without a float64 copy of the whole tensor."""
    rows = tensor if tensor.ndim > 1 else tensor.reshape(1, -1) if tensor.numel() <= PIECE else tensor.unsqueeze(-1)
    step = max(1, PIECE * rows.shape[0] // max(rows.numel(), 1))
    pieces = (rows[start : start + step] for start in range(0, rows.shape[0], step))
    return math.sqrt(sum(float(torch.linalg.vector_norm(p, dtype=torch.float64)) ** 2 for p in pieces))


def weighted_sum(tensors: Sequence[Tensor], coefficients: Sequence[float], out: Tensor | None = None) -> Tensor:
    """`sum_t c_t X_t` in a new tensor, or in `out` (contiguous); one walk, or none where all coefficients are zero."""
    out = empty_result(tensors) if out is None else out
    into = out.view(-1)
    if not any(coefficients):
        return out.zero_()
    for start, pieces_TP in walk(tensors):
        piece = into[start : start + pieces_TP[0].numel()].zero_()
        for c, x in zip(coefficients, pieces_TP, strict=True):
            if c != 0:
                piece.add_(x, alpha=c)
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
    return entries + 2 * n_tensors * min(PLACE, max(1, entries))
