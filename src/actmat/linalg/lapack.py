"""LAPACK's eigen- and singular value decompositions, with every retry recorded.

LAPACK's divide and conquer can fail to converge on finite input. The decompositions here then try again, in float64
and after that with a jitter, and return the names of the retries; they never give another answer silently.

Shapes: `M` rows, `N` columns (or the side of a symmetric matrix), `R = min(M, N)`. Leading batch axes are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but not exported by the stub

from actmat.errors import NumericalError

Retries = tuple[str, ...]
"""Retries after a first failure, in order: "float64", "jitter". Empty if the first attempt converged."""


Attempt = Callable[[Tensor], Tensor | Sequence[Tensor]]
"""A decomposition: matrix -> its factor or factors. Raises LinAlgError if it does not converge."""


class EconomySVD(NamedTuple):
    """`u_MR diag(s_R) vh_RN`, singular values descending; null directions are LAPACK's completion."""

    u_MR: Tensor
    s_R: Tensor
    vh_RN: Tensor
    retries: Retries


def eigh(sym_NN: Tensor) -> tuple[Tensor, Tensor, Retries]:
    """`l`, `V` and retries of `sym = V diag(l) V^T`, `l` ascending, in the dtype of the input.

    Only the lower triangle is read. The jitter of the last attempt moves each eigenvalue by less than
    `8 eps(float64) max|sym|`, which is below the rounding of the product that made the matrix.

    Raises:
        NumericalError: an entry is not finite, or no attempt converged.
    """
    (values, vectors), retries = _with_retries(sym_NN, torch.linalg.eigh, "symmetric eigendecomposition")
    return values, vectors, retries


def economy_svd(a_MN: Tensor) -> EconomySVD:
    """`a = u diag(s) vh` with all `R = min(M, N)` singular triplets, in the dtype of the input; errors as `eigh`."""
    economy = partial(torch.linalg.svd, full_matrices=False)
    (u, s, vh), retries = _with_retries(a_MN, economy, "singular value decomposition")
    return EconomySVD(u, s, vh, retries)


def retry_stats(retries: Iterable[str]) -> dict[str, str]:
    """Entry of a tensor's record: `retries` names the kinds of retries; empty without any."""
    names = sorted(set(retries))
    return {"retries": ", ".join(names)} if names else {}


def _with_retries(matrix: Tensor, attempt: Attempt, what: str) -> tuple[Sequence[Tensor], Retries]:
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
    for retry in ("", "jitter") if dtype == torch.float64 else ("", "float64", "jitter"):
        if retry:
            matrix = matrix.double() if retry == "float64" else _jittered(matrix)
            retries.append(retry)
        try:
            result = attempt(matrix)
        except LinAlgError:
            continue
        factors = [result] if isinstance(result, Tensor) else result
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
