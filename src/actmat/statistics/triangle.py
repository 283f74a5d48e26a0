"""Gram matrices as they are stored: the lower triangle row by row, `(i, j)`, `j <= i`, at `i (i + 1) / 2 + j`; or the
rows `z` themselves, `N I`, where they are at most half as many as columns.

Shapes: `G` groups of a convolution, `I` in_features.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Rows of one block of a Gram's triangle: at I = 1024, 9/16 of the full product; large enough for a fast product."""


def packed_size(width: int) -> int:
    """Entries of the lower triangle of an `I x I` matrix."""
    return width * (width + 1) // 2


def packed_shape(width: int, groups: int) -> tuple[int, ...]:
    """Shape of a stored Gram: `I(I+1)/2`, or `G I(I+1)/2`."""
    return (packed_size(width),) if groups == 1 else (groups, packed_size(width))


def unpack(packed: Tensor, width: int, groups: int = 1) -> Tensor:
    """The symmetric `I I` of a stored Gram, of its triangle or of few rows `N I`; `G I I` for groups."""
    if packed.ndim == 2 and groups == 1:
        return packed.mT @ packed
    full = packed.new_empty(*packed.shape[:-1], width, width)
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        lower = packed.new_ones(stop - start, stop, dtype=torch.bool).tril(start)
        entries = packed[..., packed_size(start) : packed_size(stop)]
        full[..., start:stop, :stop].masked_scatter_(lower, entries)
        corner = full[..., start:stop, start:stop]
        corner.copy_(corner.tril() + corner.tril(-1).mT)
        full[..., :start, start:stop] = full[..., start:stop, :start].mT
    return full
