"""Inner products of a few long vectors, span by span: in float64, or of short blocks in float32 added up in float64.

Blocks take 0.15 to 0.27 of float64's time. Rounding makes the cosine of a span wrong by less than 1e-8, and as
the errors of different blocks have nothing to do with each other, that of a tensor by less still: at most 1.1e-9 of 4
million random entries, where one product in float32 is wrong by 3e-5 (`python -m benchmarks.products`).

Shapes: `T` tensors, `S` entries of a span, `N` blocks of `B` entries, `R` entries of a row in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from actmat.linalg.places import Stacked

__all__ = ["BLOCK", "MANY", "ROW", "SPAN", "Products", "products_workspace"]

BLOCK = 1 << 8
"""Entries whose products are added in float32. The error grows with it."""

MANY = 1 << 16
"""Entries of a tensor from which blocks are used; fewer take no time, and are too few for errors to cancel."""

LARGEST, SMALLEST = 1e30, 1e-30
"""Mean squares between which float32 neither overflows nor loses what counts to underflow."""

SPAN = 1 << 18
"""Entries multiplied by one call. Places of this length are taken as they lie where they are `Stacked`."""

ROW = 1 << 15
"""Entries of a row in float64, 256 KiB: those of four tensors stay in a core's own cache. Longer ones take about twice
as long, and room for whole places would be so large that malloc returns it after every tensor."""


class Products:
    """Inner products of spans of tensors of one shape and dtype.

    Room for rows and its views are made once, because every call of torch may wait for another thread. Rows of
    float32 always lie equally far apart, at addresses that are equally aligned: the last bits of a BLAS may depend on
    it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._short = dtype == torch.float32 and math.prod(shape) >= MANY
        self._room = Stacked(torch.empty(0, 0))
        self._rows_TS = self._room.rows_TS
        self._blocks_NTB = self._blocks_NBT = self._rest_TR = self._rows_TS
        self._each_TR: list[Tensor] = []
        self._all_TR = self._all_RT = self._rows_TS

    def spans(self, pieces_TP: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """The same entries of all pieces, a span at a time; on accelerators all at once."""
        yield from _cuts(pieces_TP, SPAN if pieces_TP[0].device.type == "cpu" else pieces_TP[0].numel())

    def of(self, span_TS: Sequence[Tensor]) -> Tensor:
        """`<x_s, x_t>` over one span (`T x T`, float64, on the CPU)."""
        if self._short and span_TS[0].device.type == "cpu":
            found_TT = self._of_blocks(span_TS)
            if found_TT is not None:
                return found_TT
        return self._of_rows(span_TS).cpu()

    def _of_blocks(self, span_TS: Sequence[Tensor]) -> Tensor | None:
        """None where float32 does not hold the squares, or a tensor has none but zeros."""
        rows_TS = span_TS.rows_TS if isinstance(span_TS, Stacked) else self._laid(span_TS)
        if rows_TS is not self._rows_TS:
            count, size = rows_TS.shape
            whole = size // BLOCK * BLOCK
            self._rows_TS = rows_TS
            self._blocks_NTB = rows_TS[:, :whole].view(count, -1, BLOCK).transpose(0, 1)
            self._blocks_NBT = self._blocks_NTB.mT
            self._rest_TR = rows_TS[:, whole:]
        found_TT = torch.bmm(self._blocks_NTB, self._blocks_NBT).sum(0, dtype=torch.float64)
        if self._rest_TR.numel():
            rest_TR = self._rest_TR.double()
            found_TT.addmm_(rest_TR, rest_TR.mT)
        squares, size = found_TT.diagonal().tolist(), rows_TS.shape[1]
        return found_TT if size * SMALLEST < min(squares) and max(squares) < size * LARGEST else None

    def _laid(self, span_TS: Sequence[Tensor]) -> Tensor:
        count, size = len(span_TS), span_TS[0].numel()
        if self._room.rows_TS.shape != (count, size):
            self._room = Stacked(torch.empty(count, SPAN)[:, :size])
        for row_S, cut_S in zip(self._room, span_TS, strict=True):
            row_S.copy_(cut_S)
        return self._room.rows_TS

    def _of_rows(self, span_TS: Sequence[Tensor]) -> Tensor:
        like_S = span_TS[0]
        gram_TT = torch.zeros((len(span_TS), len(span_TS)), dtype=torch.float64, device=like_S.device)
        for cuts_TR in _cuts(span_TS, ROW if like_S.device.type == "cpu" else like_S.numel()):
            if not self._each_TR or self._each_TR[0].numel() != cuts_TR[0].numel():
                shape = len(cuts_TR), cuts_TR[0].numel()
                self._all_TR = torch.empty(shape, dtype=torch.float64, device=like_S.device)
                self._all_RT, self._each_TR = self._all_TR.mT, list(self._all_TR)
            for row_R, cut_R in zip(self._each_TR, cuts_TR, strict=True):
                row_R.copy_(cut_R)
            gram_TT.addmm_(self._all_TR, self._all_RT)
        return gram_TT


def _cuts(pieces_TP: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    """The same entries of all pieces, at most `size` at a time."""
    if pieces_TP[0].numel() <= size:
        yield pieces_TP
        return
    yield from zip(*(torch.split(piece_P, size) for piece_P in pieces_TP), strict=True)


def products_workspace(entries: int, n_tensors: int) -> int:
    """Elements of float32 that `Products` of tensors with so many entries hold."""
    rows = 2 * min(2 * ROW, max(1, entries))  # in float64; those of the last, shorter cut are new ones
    return n_tensors * (rows + (SPAN if entries >= MANY else 0))
