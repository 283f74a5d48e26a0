"""Common parts of the singular-vector methods: polar factors, rank slots, isotropic spectra.

The polar factor of `A = U diag(s) V^T` is `U V^T` over the triplets with `s_i > rtol * s_1`: a partial isometry,
determined by `A`, the nearest matrix whose singular values are all one (or zero). For full column rank it equals
`A (A^T A)^(-1/2)`, Loewdin's symmetric orthogonalization. Directions beyond the numerical range are left at zero; an
orthonormal completion of them would be LAPACK's choice, not the data's.

Shapes: `T` experts, `O` out_features, `I` in_features, `K` singular triplets of one expert, `J = T * K` of all; `M`
rows and `N` columns of any matrix, `S = min(M, N)`. Leading batch axes are allowed. Everything is float64 inside;
callers round once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.lapack import Retries
from actmat.linalg.svd import (
    COLUMNS,
    RANK_RTOL,
    ThinSVD,
    accuracy_of,
    gram_is_enough,
    gram_spectrum,
    numerical_range,
    orthogonal_svd,
    short_gram,
)

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
        accuracy: float32 or float64; default: that of the matrix's dtype.
        rtol: directions with `s <= rtol * s_1` are left at zero.
        complete: use all `S` singular vectors that LAPACK returns, null directions included: then the factor of a
            rank-deficient matrix is an isometry, but an arbitrary one.

    Raises:
        NumericalError: the matrix is not finite, or its decomposition did not converge.
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
    is_wide = matrix_MN.shape[-2] <= matrix_MN.shape[-1]
    panels = (torch.split(x, COLUMNS, dim=-1 if is_wide else -2) for x in (factor_MN, matrix_MN))
    for out, part in zip(*panels, strict=True):
        out.copy_(root_SS @ part.to(torch.float64) if is_wide else part.to(torch.float64) @ root_SS)
    return Polar(factor_MN, s_S, rank, retries)


def slots_per_expert(shape: Sequence[int], n_experts: int) -> int:
    """`floor(min(O, I) / T)`: an equal share of the directions of a matrix of this shape."""
    return min(shape[-2:]) // n_experts


def trim_parts(parts: Sequence[ThinSVD]) -> list[ThinSVD]:
    """The parts without the columns that are zero in all of them, beyond the largest rank; at least one column."""
    size = max(1, *(int((p.s_K > 0).sum(-1).max()) for p in parts))
    return [replace(p, u_OK=p.u_OK[..., :size], s_K=p.s_K[..., :size], v_IK=p.v_IK[..., :size]) for p in parts]


def join_parts(parts: Sequence[ThinSVD]) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors, singular values and right vectors of all parts side by side: `O x J`, `J`, `I x J`."""
    u_OJ, s_J, v_IJ = (torch.cat(side, dim=-1) for side in zip(*((p.u_OK, p.s_K, p.v_IK) for p in parts), strict=True))
    return u_OJ, s_J, v_IJ


SpectrumMean = Literal["all", "rank", "rms"]
"""SpectrumMean of the singular values in an isotropic matrix, see `isotropic`."""


def orthogonalized_sum(
    u_OJ: Tensor, s_J: Tensor, v_IJ: Tensor, accuracy: torch.dtype
) -> tuple[Tensor, Tensor, Retries]:
    """`polar(U) diag(s) polar(V)^T` as its two factors `O x J` (with `s` inside) and `J x I`, and `retries`.

    A column that is zero (beyond an expert's rank) stays zero in the polar factor, so it contributes nothing.
    A flip of the signs of `u_j` and `v_j` together changes nothing: `polar(U S) = polar(U) S` for diagonal signs.
    """
    left, right = polar_factor(u_OJ, accuracy=accuracy), polar_factor(v_IJ, accuracy=accuracy)
    return left.factor_MN * s_J.unsqueeze(-2), right.factor_MN.mT, left.retries + right.retries


def isotropic(
    total_OI: Tensor,
    directions: int,
    *,
    mean: SpectrumMean = "all",
    complete: bool = False,
    rtol: float = RANK_RTOL,
    accuracy: torch.dtype | None = None,
) -> tuple[Tensor, Polar]:
    """`c U V^T` for `total = U diag(s) V^T`, with `c` the mean singular value, and the polar decomposition used.

    Args:
        directions: `min(O, I)` of the layer; larger than that of `total` when `total` is a small core of it.
        mean: "all": `c = sum(s) / directions`; "rank": `c = sum(s) / rank`; "rms": `c = sqrt(sum(s^2) / directions)`.
        complete: give LAPACK's null directions the value `c`, too; see `polar_factor`.
        rtol, accuracy: see `polar_factor`.
    """
    polar = polar_factor(total_OI, accuracy=accuracy, rtol=rtol, complete=complete)
    if mean == "rms":
        level = torch.linalg.vector_norm(polar.s_S, dim=-1) / math.sqrt(directions)
    else:
        level = polar.s_S.sum(-1) / (polar.rank.clamp_min(1) if mean == "rank" else directions)
    # A zero matrix has no directions: keep exact zeros, also where LAPACK would complete it to an isometry.
    return polar.factor_MN * level[..., None, None], polar
