"""Inner products and weighted sums of whole tensors, in chunks that stay in the cache.

Methods that treat a tensor as one long vector (slerp, Karcher mean, Model Stock) need only the `T x T` matrix of
inner products and one weighted sum: two passes over memory.

Products are formed in float64, or of short runs in float32 that are added up in float64, which takes 0.15 to 0.27 of
the time. Rounding makes the cosine of one product wrong by less than 1e-8, and that of a tensor by less, because the
errors of different runs are independent: at most 1.1e-9 for 4 million random entries, where one product in float32 is
wrong by 3e-5 (2 to 3 tensors of 4 million entries, 2026-11-22).

Shapes: `T` tensors of equal shape, `N` entries of each (of `Products`: runs of `B` entries), `P` entries of a chunk,
`S` entries of one product, `R` entries of a row in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from actmat.linalg.chunks import SHORT_CHUNK, Stacked, chunk_size, empty_result, shape_and_dtype, walk

RUN = 1 << 8
"""Entries whose products are added in float32. The error grows with it."""

MANY = 1 << 16
"""Smallest number of entries of a tensor for short runs; fewer take no time, and errors would not cancel."""

LARGEST, SMALLEST = 1e30, 1e-30
"""Mean squares between which float32 neither overflows nor underflows noticeably."""

PRODUCT = 1 << 18
"""Entries multiplied by one call. Chunks of this length that are `Stacked` are used without a copy."""

ROW = 1 << 15
"""Entries of a row in float64, 256 KiB: rows of four tensors stay in a core's private cache. Longer ones take about
twice as long, and buffers for whole chunks would be so large that malloc returns them after every tensor."""


class Products:
    """Inner products of tensors of one shape and dtype, part by part.

    Buffers and their views are made once, because every call of torch may wait for another thread. Rows of float32
    always have the same distance and alignment in memory, on which the last bits of a BLAS may depend.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._short = dtype == torch.float32 and math.prod(shape) >= MANY
        self._copies = Stacked(torch.empty(0, 0))
        self._rows_TS = self._copies.rows_TS
        self._runs_NTB = self._runs_NBT = self._rest_TR = self._rows_TS
        self._each_TR: list[Tensor] = []
        self._all_TR = self._all_RT = self._rows_TS

    def parts(self, chunks_TP: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """The same entries of all chunks, as many as one product takes; on accelerators all at once."""
        yield from _cuts(chunks_TP, PRODUCT if chunks_TP[0].device.type == "cpu" else chunks_TP[0].numel())

    def of(self, parts_TS: Sequence[Tensor]) -> Tensor:
        """`<x_s, x_t>` over the given entries (`T x T`, float64, on the CPU)."""
        if self._short and parts_TS[0].device.type == "cpu":
            found_TT = self._of_runs(parts_TS)
            if found_TT is not None:
                return found_TT
        return self._of_rows(parts_TS).cpu()

    def _of_runs(self, parts_TS: Sequence[Tensor]) -> Tensor | None:
        """`of` by short runs in float32; None if float32 does not hold the squares, or a tensor is all zeros."""
        rows_TS = parts_TS.rows_TS if isinstance(parts_TS, Stacked) else self._copied(parts_TS)
        if rows_TS is not self._rows_TS:
            count, size = rows_TS.shape
            whole = size // RUN * RUN
            self._rows_TS = rows_TS
            self._runs_NTB = rows_TS[:, :whole].view(count, -1, RUN).transpose(0, 1)
            self._runs_NBT = self._runs_NTB.mT
            self._rest_TR = rows_TS[:, whole:]
        found_TT = torch.bmm(self._runs_NTB, self._runs_NBT).sum(0, dtype=torch.float64)
        if self._rest_TR.numel():
            rest_TR = self._rest_TR.double()
            found_TT.addmm_(rest_TR, rest_TR.mT)
        squares, size = found_TT.diagonal().tolist(), rows_TS.shape[1]
        return found_TT if size * SMALLEST < min(squares) and max(squares) < size * LARGEST else None

    def _copied(self, parts_TS: Sequence[Tensor]) -> Tensor:
        count, size = len(parts_TS), parts_TS[0].numel()
        if self._copies.rows_TS.shape != (count, size):
            self._copies = Stacked(torch.empty(count, PRODUCT)[:, :size])
        for row_S, part_S in zip(self._copies, parts_TS, strict=True):
            row_S.copy_(part_S)
        return self._copies.rows_TS

    def _of_rows(self, parts_TS: Sequence[Tensor]) -> Tensor:
        like_S = parts_TS[0]
        gram_TT = torch.zeros((len(parts_TS), len(parts_TS)), dtype=torch.float64, device=like_S.device)
        for cuts_TR in _cuts(parts_TS, ROW if like_S.device.type == "cpu" else like_S.numel()):
            if not self._each_TR or self._each_TR[0].numel() != cuts_TR[0].numel():
                shape = len(cuts_TR), cuts_TR[0].numel()
                self._all_TR = torch.empty(shape, dtype=torch.float64, device=like_S.device)
                self._all_RT, self._each_TR = self._all_TR.mT, list(self._all_TR)
            for row_R, cut_R in zip(self._each_TR, cuts_TR, strict=True):
                row_R.copy_(cut_R)
            gram_TT.addmm_(self._all_TR, self._all_RT)
        return gram_TT


def _cuts(chunks_TP: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    """The same entries of all chunks, at most `size` at a time."""
    if chunks_TP[0].numel() <= size:
        yield chunks_TP
        return
    yield from zip(*(torch.split(chunk_P, size) for chunk_P in chunks_TP), strict=True)


def inner_products(tensors: Sequence[Tensor]) -> Tensor:
    """`G[s, t] = <X_s, X_t>` over all entries (`T x T`, float64, on the CPU); one walk.

    Angles between fine-tuned models are small: `1 - cos` near 1e-7 is lost in a float32 sum.
    """
    if not tensors:
        return torch.zeros((0, 0), dtype=torch.float64)
    return chunk_products(len(tensors), *shape_and_dtype(tensors), (chunks_TP for _, chunks_TP in walk(tensors)))


def chunk_products(count: int, shape: Sequence[int], dtype: torch.dtype, chunks: Iterable[Sequence[Tensor]]) -> Tensor:
    """`inner_products` of `count` tensors of this shape and dtype, given as the chunks of one walk."""
    gram_TT, products = torch.zeros((count, count), dtype=torch.float64), Products(shape, dtype)
    for chunks_TP in chunks:
        for parts_TS in products.parts(chunks_TP):
            gram_TT += products.of(parts_TS)
    return gram_TT


def is_finite(tensor: Tensor) -> bool:
    """True if no entry is NaN or Inf: a sum is finite only if every entry is, or it overflows, which is looked at."""
    return math.isfinite(float(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def frobenius_norm64(tensor: Tensor) -> float:
    """`||X||_F` over all entries, summed in float64 without a float64 copy of the whole tensor.

    A device sums large chunks and is asked once: asked for every short chunk, it was idle for three quarters of
    `actmat_ridge` (11008 x 4096, NVIDIA H100, 2026-11-26).
    """
    if tensor.device.type != "cpu":
        cuts = torch.split(tensor.reshape(-1), chunk_size(tensor.device))
        return float(torch.stack([torch.linalg.vector_norm(c, dtype=torch.float64) for c in cuts]).norm())
    if tensor.ndim > 1:
        rows = tensor
    else:
        rows = tensor.reshape(1, -1) if tensor.numel() <= SHORT_CHUNK else tensor.unsqueeze(-1)
    step = max(1, SHORT_CHUNK * rows.shape[0] // max(rows.numel(), 1))
    chunks = (rows[start : start + step] for start in range(0, rows.shape[0], step))
    return math.sqrt(sum(float(torch.linalg.vector_norm(c, dtype=torch.float64)) ** 2 for c in chunks))


def weighted_sum(tensors: Sequence[Tensor], coefficients: Sequence[float], out: Tensor | None = None) -> Tensor:
    """`sum_t c_t X_t` in a new tensor, or in `out` (contiguous); one walk, or none if all coefficients are zero."""
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


def one_pass_sum(deltas: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """`sum_t w_t D_t` in a new tensor; each delta is read once and one is alive at a time."""
    pairs = zip(deltas, weights, strict=True)
    delta, weight = next(pairs)
    out = delta * weight
    for delta, weight in pairs:
        out.add_(delta, alpha=weight)
    return out


def inner_workspace(entries: int, n_tensors: int) -> int:
    """Elements of float32 that `inner_products` and one `weighted_sum` hold at their peak, the sum included."""
    rows = 2 * min(2 * ROW, max(1, entries))  # in float64; the last, shorter rows are new ones
    return entries + n_tensors * (rows + (PRODUCT if entries >= MANY else 0))
