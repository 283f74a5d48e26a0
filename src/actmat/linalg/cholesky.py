"""Cholesky factorisations that replace an eigendecomposition where both provably give the same answer.

Shapes: `N` side of a symmetric matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["certified_cholesky", "shifted_cholesky"]


def shifted_cholesky(sym_NN: Tensor, shift: float, dtype: torch.dtype) -> Tensor | None:
    """Lower factor `L` of `sym + shift I = L L^T` in `dtype`, or None when that is not positive definite.

    >>> shifted_cholesky(torch.eye(2), 3.0, torch.float64).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    >>> shifted_cholesky(torch.eye(2), -1.0, torch.float64) is None
    True
    """
    shifted = sym_NN.to(dtype, copy=True)
    shifted.diagonal().add_(shift)
    factor, info = torch.linalg.cholesky_ex(shifted)
    return factor if int(info) == 0 else None


def certified_cholesky(sym_NN: Tensor, rtol: float) -> tuple[Tensor, float] | None:
    """float64 Cholesky factor of `sym`, but only if no eigenvalue is at or below `rtol * lambda_max`.

    `min(||sym||_F, ||sym||_inf) = u >= lambda_max`, and by Sylvester's law of inertia a Cholesky factorisation of
    `sym - c I` that succeeds proves `lambda_min > c`. With `c = rtol u + margin` this proves
    `lambda_min > rtol lambda_max`; the margin covers the backward error of the factorisation,
    `(N + 2) eps(float64) tr(sym)` (Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 10.3).

    Returns:
        The factor and `rtol u`, an upper bound of the absolute cut-off; None when the proof does not succeed, from
        which nothing follows.
    """
    n, trace = sym_NN.shape[-1], float(sym_NN.diagonal().double().sum())
    norms = torch.linalg.matrix_norm(sym_NN, "fro"), torch.linalg.matrix_norm(sym_NN, float("inf"))
    bound = rtol * 1.001 * float(torch.minimum(*norms))  # 0.1 %: the rounding of the norms themselves
    shift = bound + 4 * (n + 2) * torch.finfo(torch.float64).eps * trace
    if float(sym_NN.diagonal().min()) <= shift:  # lambda_min never exceeds a diagonal entry
        return None
    if shifted_cholesky(sym_NN, -shift, torch.float64) is None:
        return None
    factor = shifted_cholesky(sym_NN, 0.0, torch.float64)
    return None if factor is None else (factor, bound)
