"""Symmetric eigendecomposition, thin SVD and Cholesky, with every retry on the record.

LAPACK's divide and conquer can fail to converge on finite input. The decompositions here then try again, in float64
and after that with a jitter, and return the names of the retries; they never turn to another answer in silence.

Shapes: `M` rows, `N` columns (or the side of a symmetric matrix), `R = min(M, N)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from actmat.errors import NumericalError

__all__ = ["Spectrum", "ThinSvd", "certified_cholesky", "eigh", "shifted_cholesky", "thin_svd"]

_Factors = TypeVar("_Factors")


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Eigenvalues (ascending) and eigenvectors (columns; None means the identity) of a symmetric matrix."""

    values_N: Tensor
    vectors_NN: Tensor | None
    retries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ThinSvd:
    """`u_MR diag(s_R) vh_RN`, singular values descending."""

    u_MR: Tensor
    s_R: Tensor
    vh_RN: Tensor
    retries: tuple[str, ...] = ()


def eigh(sym_NN: Tensor) -> Spectrum:
    """`sym = V diag(l) V^T`, `l` ascending, in the dtype of the input.

    Only the lower triangle is read. The jitter of the last attempt moves each eigenvalue by less than
    `8 eps(float64) max|sym|`, which is below the rounding of the product that made the matrix.

    Raises:
        NumericalError: an entry is not finite, or three attempts did not converge.
    """

    def attempt(matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors

    (values, vectors), retries = _with_retries(sym_NN, attempt, "the symmetric eigendecomposition")
    return Spectrum(values.to(sym_NN.dtype), vectors.to(sym_NN.dtype), retries)


def thin_svd(a_MN: Tensor) -> ThinSvd:
    """`a = u diag(s) vh` with `R = min(M, N)` singular triplets, in the dtype of the input.

    Raises:
        NumericalError: an entry is not finite, or three attempts did not converge.
    """

    def attempt(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return u, s, vh

    (u, s, vh), retries = _with_retries(a_MN, attempt, "the singular value decomposition")
    return ThinSvd(u.to(a_MN.dtype), s.to(a_MN.dtype), vh.to(a_MN.dtype), retries)


def _with_retries(matrix: Tensor, attempt: Callable[[Tensor], _Factors], what: str) -> tuple[_Factors, tuple[str, ...]]:
    """First success of: as given, in float64, in float64 with a graded diagonal jitter."""
    if not bool(torch.isfinite(matrix).all()):
        raise NumericalError(
            f"{what} needs finite entries, but the {matrix.shape[-2]} x {matrix.shape[-1]} matrix holds NaN or "
            "infinity. Likely cause: an expert holds such values, or products of its entries overflow the compute "
            "dtype. Fix: check the experts, or compute in float64."
        )
    retries: tuple[str, ...] = ()
    for retry in ("", "float64", "jitter"):
        if retry:
            retries = (*retries, retry)
            matrix = matrix.double()
        if retry == "jitter":
            # A ramp, not a constant: a constant shift leaves eigenvectors, and the failure, as they were.
            diagonal = matrix.diagonal()
            ramp = torch.linspace(1, 8, diagonal.numel(), dtype=matrix.dtype, device=matrix.device)
            jitter = ramp * torch.finfo(matrix.dtype).eps * matrix.abs().amax()
            matrix = matrix.clone()
            matrix.diagonal().add_(jitter)
        try:
            return attempt(matrix), retries
        except LinAlgError:
            continue
    raise NumericalError(
        f"{what} of a {matrix.shape[-2]} x {matrix.shape[-1]} matrix did not converge: neither as given, nor in "
        "float64, nor with a jitter of rounding size. Likely cause: a faulty LAPACK build. Fix: another torch build, "
        "or the option solver='stacked', which takes another decomposition."
    )


def shifted_cholesky(sym_NN: Tensor, shift: float, dtype: torch.dtype) -> Tensor | None:
    """Lower factor `L` of `sym + shift I = L L^T` in `dtype`, or None when that is not positive definite."""
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
        The factor and `rtol u`, an upper bound of the absolute cut-off; None when the proof does not succeed, which
        says nothing about the matrix.
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
