"""Masks of the largest magnitudes, and factors that keep a norm.

Shapes: `T` experts, `N` entries of a flattened tensor, `P` entries of one chunk of it, `O` rows and `I`
columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from actmat.linalg.chunks import chunks_of, shape_and_dtype, walk
from actmat.linalg.masks.mask import Mask, Trim
from actmat.linalg.masks.threshold import Cut, StreamedCut, kth_magnitudes, outer_cut

__all__ = ["l1_factors", "top_trims", "top_trims_each", "trim_to_top"]


def top_trims(flat_N: Tensor, ranks: Sequence[int], *, exact: bool) -> list[tuple[Trim, Cut]]:
    """The mask of the `k` largest magnitudes, and its threshold, for each `k` of `ranks`.

    Args:
        flat_N: 1-D delta.
        ranks: numbers of entries to keep.
        exact: keep exactly `k`, the first in storage order among equal magnitudes; else all that equal the k-th.

    >>> ((trim, cut),) = top_trims(torch.tensor([1.0, -3.0, 2.0, 2.0]), [2], exact=True)
    >>> cut.value, trim.quota
    (2.0, 1)
    """
    return [(_trim_at(cut, flat_N.dtype, exact=exact), cut) for cut in kth_magnitudes(flat_N, ranks)]


def top_trims_each(deltas: Sequence[Tensor], ranks: Sequence[int], *, exact: bool) -> list[tuple[Trim, Cut]]:
    """The mask of the `k` largest magnitudes of each delta, with its own `k`; deltas may be streamed."""
    shape, dtype = shape_and_dtype(deltas)
    total = math.prod(shape)
    selections = [StreamedCut(partial(_of_any_total, k), None if 0 < k < total else outer_cut(k, total)) for k in ranks]
    while any(selection.cut is None for selection in selections):
        for _, chunks_TP in walk(deltas):
            for selection, chunk_P in zip(selections, chunks_TP, strict=True):
                selection.observe(chunk_P)
        for selection in selections:
            selection.advance()
    cuts = [selection.cut for selection in selections if selection.cut is not None]
    return [(_trim_at(cut, dtype, exact=exact), cut) for cut in cuts]


def trim_to_top(delta_OI: Tensor, fraction: float) -> Tensor:
    """A copy in which all but the `round(fraction * O * I)` entries of largest magnitude are zero.

    At least one entry is kept; entries whose magnitude equals the smallest one kept stay as well, so that the result
    does not depend on the order of equal entries.

    >>> trim_to_top(torch.tensor([[1.0, -3.0], [2.0, 0.5]]), 0.5).tolist()
    [[0.0, -3.0], [2.0, 0.0]]
    """
    flat_N = delta_OI.reshape(-1)
    kept = min(max(round(fraction * flat_N.numel()), 1), flat_N.numel())
    ((trim, _),) = top_trims(flat_N, [kept], exact=False)
    out_N = torch.empty_like(flat_N)
    trim.apply(flat_N, 0, out_N)
    return out_N.view(delta_OI.shape)


def l1_factors(flats_TN: Sequence[Tensor], masks: Sequence[Mask]) -> list[float]:
    """`||x||_1 / ||mask(x)||_1` per expert, which gives a masked delta its L1 norm back; 1 if nothing was kept."""
    factors = []
    for flat_N, mask in zip(flats_TN, masks, strict=True):
        before, after = 0.0, 0.0
        for start, chunk_P in chunks_of(flat_N):
            out_P = torch.empty_like(chunk_P)
            mask.apply(chunk_P, start, out_P)
            before += float(chunk_P.abs().sum(dtype=torch.float64))
            after += float(out_P.abs_().sum(dtype=torch.float64))
        factors.append(before / after if after > 0 else 1.0)
    return factors


def _of_any_total(rank: int, total: int) -> int:
    del total
    return rank


def _trim_at(cut: Cut, dtype: torch.dtype, *, exact: bool) -> Trim:
    surplus = exact and cut.value > 0 and cut.above + cut.equal > cut.rank
    return Trim.at(cut.value, dtype, cut.rank - cut.above if surplus else None)
