"""Inner products and weighted sums of whole tensors, in chunks that stay in the cache.

Methods that treat a tensor as one long vector (slerp, Karcher mean, Model Stock) need only the `T x T` matrix of
inner products and one weighted sum: two passes over memory, whatever they compute in between.

Shapes: `T` tensors of equal shape, `N` entries of each, `P` entries of a chunk, `S` entries of one product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from actmat.linalg.chunks import SHORT_CHUNK, empty_result, shape_and_dtype, walk
from actmat.linalg.products import Products, products_workspace

__all__ = ["add_up", "frobenius_norm64", "inner_products", "inner_workspace", "one_pass_sum", "weighted_sum"]


def inner_products(tensors: Sequence[Tensor]) -> Tensor:
    """`G[s, t] = <X_s, X_t>` over all entries (`T x T`, float64, on the CPU); one walk.

    Angles between fine-tuned models are small: `1 - cos` near 1e-7 is lost in a float32 sum (`linalg.products`).
    """
    gram_TT = torch.zeros((len(tensors), len(tensors)), dtype=torch.float64)
    if tensors:
        products = Products(*shape_and_dtype(tensors))
        for _, chunks_TP in walk(tensors):
            for parts_TS in products.parts(chunks_TP):
                gram_TT += products.of(parts_TS)
    return gram_TT


def frobenius_norm64(tensor: Tensor) -> float:
    """`||X||_F` over all entries, summed in float64 without a float64 copy of the whole tensor."""
    if tensor.ndim > 1:
        rows = tensor
    else:
        rows = tensor.reshape(1, -1) if tensor.numel() <= SHORT_CHUNK else tensor.unsqueeze(-1)
    step = max(1, SHORT_CHUNK * rows.shape[0] // max(rows.numel(), 1))
    chunks = (rows[start : start + step] for start in range(0, rows.shape[0], step))
    return math.sqrt(sum(float(torch.linalg.vector_norm(c, dtype=torch.float64)) ** 2 for c in chunks))


def weighted_sum(tensors: Sequence[Tensor], coefficients: Sequence[float], out: Tensor | None = None) -> Tensor:
    """`sum_t c_t X_t` in a new tensor, or in `out` (contiguous); one walk, or none where all coefficients are zero."""
    out = empty_result(tensors) if out is None else out
    out_N = out.view(-1)
    if not any(coefficients):
        return out.zero_()
    for start, chunks_TP in walk(tensors):
        add_up(chunks_TP, coefficients, out_N[start : start + chunks_TP[0].numel()])
    return out


def add_up(chunks_TP: Sequence[Tensor], coefficients: Sequence[float], out_P: Tensor) -> Tensor:
    """`sum_t c_t X_t` of one chunk, in `out_P`; all callers get the same bits."""
    terms = [(c, x_P) for c, x_P in zip(coefficients, chunks_TP, strict=True) if c != 0]
    if not terms:
        return out_P.zero_()
    torch.add(_zero(out_P.dtype, out_P.device), terms[0][1], alpha=terms[0][0], out=out_P)  # +0 first: no sum is -0
    for c, x_P in terms[1:]:
        out_P.add_(x_P, alpha=c)
    return out_P


@cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def one_pass_sum(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """`sum_t w_t D_t` in a new tensor; each delta is read once and one is alive at a time."""
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
    return entries + products_workspace(entries, n_tensors)
