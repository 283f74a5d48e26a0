"""LAPACK's eigen- and singular value decompositions, with every retry recorded.

LAPACK's divide and conquer can fail to converge on finite input. The decompositions here then try again, in float64
and after that with a jitter, and return the names of the retries; they never give another answer silently.

Shapes: `M` rows, `N` columns (or the side of a symmetric matrix), `R = min(M, N)`. Leading batch axes are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but not exported by the stub

from actmat.errors import NumericalError

__all__ = [
    "EconomySVD",
    "Eigen",
    "Retries",
    "economy_svd",
    "eigh",
    "only_eigenvalues",
    "only_singular_values",
    "retry_stats",
]

Retries = tuple[str, ...]
"""Retries after a first failure, in order: "float64", "jitter". Empty if the first attempt converged."""


class Eigen(NamedTuple):
    """Eigenvalues (ascending) and eigenvectors (columns) of a symmetric matrix."""

    values_N: Tensor
    vectors_NN: Tensor
    retries: Retries


class EconomySVD(NamedTuple):
    """`u_MR diag(s_R) vh_RN`, singular values descending; null directions are LAPACK's completion."""

    u_MR: Tensor
    s_R: Tensor
    vh_RN: Tensor
    retries: Retries


def eigh(sym_NN: Tensor) -> Eigen:
    """`sym = V diag(l) V^T`, `l` ascending, in the dtype of the input.

    Only the lower triangle is read. The jitter of the last attempt moves each eigenvalue by less than
    `8 eps(float64) max|sym|`, which is below the rounding of the product that made the matrix.

    Raises:
        NumericalError: an entry is not finite, or no attempt converged.

    >>> eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]])).values_N.tolist()
    [1.0, 2.0]
    """
    (values, vectors), retries = _with_retries(sym_NN, _eigh, "symmetric eigendecomposition")
    return Eigen(values, vectors, retries)


def economy_svd(a_MN: Tensor) -> EconomySVD:
    """`a = u diag(s) vh` with all `R = min(M, N)` singular triplets, in the dtype of the input.

    Raises:
        NumericalError: an entry is not finite, or no attempt converged.

    >>> economy_svd(torch.tensor([[3.0, 0.0], [0.0, 4.0]])).s_R.tolist()
    [4.0, 3.0]
    """
    (u, s, vh), retries = _with_retries(a_MN, _svd, "singular value decomposition")
    return EconomySVD(u, s, vh, retries)


def only_eigenvalues(sym_NN: Tensor) -> tuple[Tensor, Retries]:
    """All eigenvalues of a symmetric matrix, ascending, with the retries and the errors of `eigh`."""
    (values,), retries = _with_retries(sym_NN, _eigvalsh, "symmetric eigendecomposition")
    return values, retries


def only_singular_values(a_MN: Tensor) -> tuple[Tensor, Retries]:
    """All `R = min(M, N)` singular values, descending, with the retries and the errors of `economy_svd`."""
    (s,), retries = _with_retries(a_MN, _svdvals, "singular value decomposition")
    return s, retries


def retry_stats(retries: Iterable[str]) -> dict[str, str]:
    """Entry of a tensor's record: `retries` names the kinds of retries; empty without any.

    >>> retry_stats(["jitter", "float64", "jitter"]), retry_stats([])
    ({'retries': 'float64, jitter'}, {})
    """
    names = sorted(set(retries))
    return {"retries": ", ".join(names)} if names else {}


def _eigh(matrix: Tensor) -> Sequence[Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors


def _eigvalsh(matrix: Tensor) -> Sequence[Tensor]:
    return (torch.linalg.eigvalsh(matrix),)


def _svd(matrix: Tensor) -> Sequence[Tensor]:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, vh


def _svdvals(matrix: Tensor) -> Sequence[Tensor]:
    return (torch.linalg.svdvals(matrix),)


def _with_retries(
    matrix: Tensor, attempt: Callable[[Tensor], Sequence[Tensor]], what: str
) -> tuple[Sequence[Tensor], Retries]:
    """First success of: as given, in float64 (if it was not), in float64 with a graded diagonal jitter.

    An attempt fails when LAPACK reports it or when a factor is not finite. Factors are returned in the dtype of the
    matrix.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise NumericalError(
            f"The {what} expects finite values; a matrix of shape {tuple(matrix.shape)} holds NaN or infinity. Likely "
            "cause: one expert's checkpoint is damaged, or products of its entries overflow the compute dtype. Fix: "
            "check the experts of this tensor, or compute in float64."
        )
    dtype, retries = matrix.dtype, []
    for retry in ("", "float64", "jitter"):
        if retry == "float64":
            if dtype == torch.float64:
                continue
            matrix = matrix.double()
        elif retry == "jitter":
            matrix = _jittered(matrix)
        if retry:
            retries.append(retry)
        try:
            factors = attempt(matrix)
        except LinAlgError:
            continue
        if all(bool(torch.isfinite(factor).all()) for factor in factors):
            return [factor.to(dtype) for factor in factors], tuple(retries)
    raise NumericalError(
        f"The {what} of a finite matrix of shape {tuple(matrix.shape)} did not converge: neither as given, nor in "
        "float64, nor with a jitter of rounding size. Likely cause: a faulty LAPACK build. Fix: another torch build, "
        "or another method (in the interference family, solver='stacked') for this tensor."
    )


def _jittered(matrix: Tensor) -> Tensor:
    """The matrix with 1 to 8 rounding units of its largest entry added along the diagonal.

    A ramp, because a constant shift would change neither the eigenvectors nor the failure.
    """
    out = matrix.clone()
    diagonal = out.diagonal(dim1=-2, dim2=-1)
    ramp = torch.linspace(1, 8, diagonal.shape[-1], dtype=matrix.dtype, device=matrix.device)
    diagonal.add_(ramp * torch.finfo(matrix.dtype).eps * matrix.abs().amax((-2, -1)).unsqueeze(-1))
    return out
