"""The polar factor on the numerical range: the nearest matrix whose singular values are all one (or zero).

Shapes: `M` rows, `N` columns, `S = min(M, N)`. Leading batch axes are allowed.

For `A = U diag(s) V^T` the factor is `U V^T` over the triplets with `s_i > rtol * s_1`: a partial isometry, determined
by `A`. For full column rank it equals `A (A^T A)^(-1/2)`, Loewdin's symmetric orthogonalisation. Directions
beyond the numerical range are left at zero; an orthonormal completion of them would be LAPACK's choice, not the data's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.linalg.lapack import Retries
from actmat.linalg.svd import (
    RANK_RTOL,
    accuracy_of,
    column_slices,
    gram_is_enough,
    gram_spectrum,
    numerical_range,
    orthogonal_svd,
    short_gram,
)

__all__ = ["Polar", "polar_factor"]

EXACT_GRAM_CONDITION = 10.0
"""Largest condition number at which `A (A^T A)^(-1/2)` loses no more than two digits of float64."""


@dataclass(frozen=True, slots=True)
class Polar:
    """`factor_MN = U V^T` (float64), the singular values of `A` (descending, zeros beyond `rank`), and `retries`."""

    factor_MN: Tensor
    s_S: Tensor
    rank: Tensor
    retries: Retries = ()


def polar_factor(
    matrix_MN: Tensor, *, accuracy: torch.dtype | None = None, rtol: float = RANK_RTOL, complete: bool = False
) -> Polar:
    """`U V^T` over the numerical range of `A = U diag(s) V^T`.

    The route through the short Gram matrix `G = E diag(l) E^T` computes `E diag(l^(-1/2)) E^T A` (`A E .. E^T` for a
    tall `A`): the basis `E` is multiplied back, without which the columns would come out rotated. Its error is
    `eps64 kappa^2` on the kept range. It is taken for float32 accuracy (see `linalg.svd`), and for float64 accuracy
    where the matrix is at least 2:1 and turns out to have `kappa <= 10`; otherwise the SVD in float64.

    Args:
        matrix_MN: `*batch M N`.
        accuracy: float32 or float64; default: that of the matrix's dtype.
        rtol: directions with `s <= rtol * s_1` are left at zero.
        complete: use all `S` singular vectors that LAPACK returns, null directions included: then the factor of a
            rank-deficient matrix is an isometry, but an arbitrary one.

    Raises:
        NumericalError: the matrix is not finite, or its decomposition did not converge.

    >>> polar_factor(torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)).factor_MN.tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    long, short = max(matrix_MN.shape[-2:]), min(matrix_MN.shape[-2:])
    if not complete:
        if gram_is_enough(accuracy or accuracy_of(matrix_MN), rtol):
            return _gram_polar(matrix_MN, *gram_spectrum(short_gram(matrix_MN)), rtol)
        if long >= 2 * short > 0:
            s_S, vectors_SS, retries = gram_spectrum(short_gram(matrix_MN))
            if bool((s_S[..., -1] * EXACT_GRAM_CONDITION > s_S[..., 0]).all()):
                return _gram_polar(matrix_MN, s_S, vectors_SS, retries, rtol)
    u_MS, s_S, v_NS, retries = orthogonal_svd(matrix_MN)
    s_S, rank = numerical_range(s_S, rtol)
    if not complete:
        u_MS = u_MS * (s_S > 0).unsqueeze(-2)
    return Polar(u_MS @ v_NS.mT, s_S, rank, retries)


def _gram_polar(matrix_MN: Tensor, s_S: Tensor, vectors_SS: Tensor, retries: Retries, rtol: float) -> Polar:
    s_S, rank = numerical_range(s_S, rtol)
    inverse_S = torch.where(s_S > 0, s_S, torch.inf).reciprocal()
    root_SS = (vectors_SS * inverse_S.unsqueeze(-2)) @ vectors_SS.mT
    factor_MN = torch.empty_like(matrix_MN, dtype=torch.float64)
    if matrix_MN.shape[-2] <= matrix_MN.shape[-1]:
        for columns in column_slices(matrix_MN.shape[-1]):
            factor_MN[..., columns] = root_SS @ matrix_MN[..., columns].to(torch.float64)
    else:
        for rows in column_slices(matrix_MN.shape[-2]):
            factor_MN[..., rows, :] = matrix_MN[..., rows, :].to(torch.float64) @ root_SS
    return Polar(factor_MN, s_S, rank, retries)
