"""The spectrum of `S = sum_t D_t^T D_t`: number and evenness of the input directions that the experts use together.

    effective rank = (tr S)^2 / ||S||_F^2 = (sum l)^2 / sum l^2      condition = l_1 / l_I

A method of the interference family has formed `S` already, and often decomposed it; its eigenvalues are reused.

Shapes: `T` experts, `O` out_features, `I` in_features, `N` eigenvalues (`I`, or fewer: the others are zero).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actmat.diagnostics.model import Spectrum
from actmat.diagnostics.rows import eigen_rank
from actmat.linalg.interference.moments import Reduced, gram_of_rows
from actmat.linalg.lapack import only_eigenvalues

EDGES = tuple(k / 4 - 8 for k in range(33))
"""log10 of eigenvalues relative to the largest: a quarter of a decade per bin, down to float32's rounding."""


def sum_eigenvalues(deltas: Sequence[Tensor], reduced: Reduced | None) -> Tensor:
    """Eigenvalues of `S`, ascending, float64, none below zero; those that are zero for lack of rows are left out.

    Args:
        deltas: `O I` each.
        reduced: of a method whose `S` is the plain sum; None: `S` is formed here, on its smaller side.

    >>> sum_eigenvalues([torch.diag(torch.tensor([1.0, 2.0]))], None).tolist()
    [1.0, 4.0]
    """
    if reduced is None:
        rows, width = deltas[0].shape
        wide = len(deltas) * rows < width
        gram = gram_of_rows([torch.cat([d.contiguous() for d in deltas]).mT] if wide else deltas)
    elif reduced.has_spectrum or reduced.gram_NN is None:
        return reduced.spectrum().values_N.double().clamp_min(0).cpu()
    else:
        gram = reduced.gram_NN
    return only_eigenvalues(gram)[0].double().clamp_min(0).cpu()


def participation(values_N: Tensor) -> float:
    """`(sum l)^2 / sum l^2`: the number of equal eigenvalues that would be as concentrated; 0 for none.

    >>> participation(torch.tensor([1.0, 1.0, 0.0]))
    2.0
    """
    squares = float(values_N.square().sum())
    return float(values_N.sum()) ** 2 / squares if squares > 0 else 0.0


def condition(values_N: Tensor, width: int) -> float | None:
    """`l_1 / l_I`, or None where `S` has no full numerical rank: then the smallest eigenvalue is rounding.

    >>> condition(torch.tensor([0.5, 1.0]), width=2)
    2.0
    """
    if values_N.numel() < width or eigen_rank(values_N, width) < width:
        return None
    return float(values_N.max() / values_N.min())


def binned(values_N: Tensor, width: int) -> Spectrum:
    """All `I` eigenvalues counted in the bins of `EDGES`; the first holds all below its upper edge, zeros included.

    >>> sum(binned(torch.tensor([0.1, 1.0]), width=3).counts)
    3
    """
    top = float(values_N.max()) if values_N.numel() else 0.0
    counts = torch.zeros(len(EDGES) - 1, dtype=torch.int64)
    if top > 0:
        floor = torch.tensor(EDGES[0], dtype=torch.float64)
        logs = torch.where(values_N > 0, (values_N / top).clamp_min(1e-300).log10(), floor).clamp(EDGES[0], EDGES[-1])
        bins = ((logs - EDGES[0]) * 4).floor().long().clamp_max(len(EDGES) - 2)
        counts = torch.bincount(bins, minlength=len(EDGES) - 1)
    counts[0] += width - values_N.numel() if top > 0 else width
    return Spectrum(EDGES, tuple(counts.tolist()))
