"""Eigen- and singular value decompositions of float64 matrices that either converge or raise, never in silence.

Shapes: `S` side of a symmetric matrix. Leading batch axes are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actmat.errors import NumericalError

__all__ = ["economy_svd", "eigh_descending", "only_singular_values"]

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # public, but not exported by the stub


def economy_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, str]:
    """`u, s, vh, retry` of `torch.linalg.svd(matrix, full_matrices=False)`.

    When LAPACK does not converge, the diagonal is raised by one rounding unit of the norm, which is within the error
    of the decomposition, and it is tried again; `retry` then reads "jitter", else "".

    Raises:
        NumericalError: the matrix is not finite, or neither attempt converged.
    """
    (u, s, vh), retry = _decompose("singular value decomposition", _svd, matrix)
    return u, s, vh, retry


def only_singular_values(matrix: Tensor) -> Tensor:
    """Singular values, descending, with the retry and the errors of `economy_svd`."""
    (s,), _ = _decompose("singular value decomposition", lambda a: (torch.linalg.svdvals(a),), matrix)
    return s


def eigh_descending(gram_SS: Tensor) -> tuple[Tensor, Tensor, str]:
    """Eigenvalues (descending), eigenvectors and `retry` of a symmetric float64 matrix.

    A decomposition that does not converge is tried again as in `economy_svd`.

    Raises:
        NumericalError: the matrix is not finite, or neither attempt converged.
    """
    (values, vectors), retry = _decompose("symmetric eigendecomposition", torch.linalg.eigh, gram_SS)
    return values.flip(-1), vectors.flip(-1), retry


def _svd(matrix: Tensor) -> Sequence[Tensor]:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, vh


def _decompose(
    what: str, function: Callable[[Tensor], Sequence[Tensor]], matrix: Tensor
) -> tuple[Sequence[Tensor], str]:
    """`function(matrix)`; if it does not converge, that of the matrix with its diagonal raised by `eps ||A||_F`."""
    try:
        parts, retry = function(matrix), ""
    except LinAlgError:
        shift = torch.finfo(matrix.dtype).eps * torch.linalg.matrix_norm(matrix)[..., None, None]
        eye = torch.eye(matrix.shape[-2], matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        try:
            parts, retry = function(matrix + shift * eye), "jitter"
        except LinAlgError as again:
            raise _failure(what, matrix) from again
    # Some LAPACKs return NaN for a matrix with infinities instead of reporting it.
    if not all(bool(torch.isfinite(part).all()) for part in parts):
        raise _failure(what, matrix)
    return parts, retry


def _failure(what: str, matrix: Tensor) -> NumericalError:
    if not bool(torch.isfinite(matrix).all()):
        return NumericalError(
            f"The {what} expects finite values; a matrix of shape {tuple(matrix.shape)} holds NaN or infinity. Likely "
            "one expert's checkpoint is damaged or overflowed in float16: check the experts of this tensor."
        )
    return NumericalError(
        f"The {what} of a finite matrix of shape {tuple(matrix.shape)} did not converge in float64, not even after a "
        "change of one rounding unit. Merge this tensor with another method, or report the matrix."
    )
