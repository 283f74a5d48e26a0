"""Proof that no eigenvalue of a symmetric matrix above a level has been missed.

Shapes: `N` side of the matrix, `K` known eigenpairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actmat.linalg.gram import add_gram

__all__ = ["none_above", "provable_level"]

MARGIN = 4
"""Factor on the bounds of rounding."""


def provable_level(count: int, trace: float) -> float:
    """Level below which `none_above` proves nothing, whatever the matrix: the rounding of `K` pairs of this trace."""
    return MARGIN * torch.finfo(torch.float64).eps * (count + 2) * 2 * trace


def none_above(sym_NN: Tensor, values_K: Tensor, vectors_KN: Tensor, level: float) -> bool:
    """True if it is proven that at most `K` eigenvalues of `sym` are at or above `level`; False proves nothing.

    `M = sym - V^T diag(l) V`, with `l >= 0`, differs from `sym` by a positive semidefinite matrix of rank `K`, so that
    the eigenvalue `K + 1` of `sym` is at most the largest of `M` (Weyl), whatever the vectors are. By Sylvester's law
    of inertia, a Cholesky factorisation of `(level - margin) I - M` that succeeds proves that all of these are below
    the level. The margin covers the backward error of the factorisation, `(N + 2) eps tr(level I - M)`, and the
    rounding of the products, `(K + 2) eps (tr(sym) + tr(V^T diag(l) V))` (N. Higham, "Accuracy and Stability of
    Numerical Algorithms", 2002, theorem 10.3 and section 3.5).

    Args:
        sym_NN: float64, positive semidefinite up to rounding.
        vectors_KN: rows.

    >>> sym = torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64))
    >>> largest, its_vector = torch.tensor([4.0]).double(), torch.eye(3, dtype=torch.float64)[:1]
    >>> none_above(sym, largest, its_vector, 2.1), none_above(sym, largest, its_vector, 1.9)
    (True, False)
    """
    size, eps = sym_NN.shape[-1], torch.finfo(torch.float64).eps
    kept_K = values_K.clamp_min(0)
    left_NN = sym_NN.neg()
    add_gram(left_NN, vectors_KN * kept_K.sqrt().unsqueeze(-1))
    summed = float(sym_NN.diagonal().sum()) + float((vectors_KN.square().sum(-1) * kept_K).sum())
    trace = size * level + float(left_NN.diagonal().sum().clamp_min(0))
    margin = MARGIN * eps * ((size + 2) * trace + (len(kept_K) + 2) * summed)
    left_NN.diagonal().add_(level - margin)
    return int(torch.linalg.cholesky_ex(left_NN, upper=True).info) == 0
