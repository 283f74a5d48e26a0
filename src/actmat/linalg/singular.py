"""Common parts of the singular-vector methods: rank slots, joint orthogonalisation, isotropic spectra.

Shapes: `T` experts, `O` out_features, `I` in_features, `K` singular triplets of one expert, `J = T * K` of all,
`M`, `N`, `S` as in `linalg.polar`. Leading batch axes are allowed. Everything is float64 inside; callers round once,
at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.lapack import Retries
from actmat.linalg.polar import Polar, polar_factor
from actmat.linalg.svd import RANK_RTOL, ThinSVD

__all__ = ["isotropic", "join", "orthogonalised_sum", "slots_per_expert"]


def slots_per_expert(shape: Sequence[int], n_experts: int) -> int:
    """`floor(min(O, I) / T)`: an equal share of the directions of a matrix of this shape.

    >>> slots_per_expert((8, 6), 4)
    1
    """
    return min(shape[-2:]) // n_experts


def join(parts: Sequence[ThinSVD]) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors, singular values and right vectors of all parts side by side: `O x J`, `J`, `I x J`."""
    return (
        torch.cat([p.u_OK for p in parts], dim=-1),
        torch.cat([p.s_K for p in parts], dim=-1),
        torch.cat([p.v_IK for p in parts], dim=-1),
    )


def orthogonalised_sum(
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
    mean: Literal["all", "rank"] = "all",
    complete: bool = False,
    rtol: float = RANK_RTOL,
    accuracy: torch.dtype | None = None,
) -> tuple[Tensor, Polar]:
    """`c U V^T` for `total = U diag(s) V^T`, with `c` the mean singular value, and the polar decomposition used.

    Args:
        total_OI: `*batch O I`.
        directions: `min(O, I)` of the layer; larger than that of `total` when `total` is a small core of it.
        mean: "all": `c = sum(s) / directions`; "rank": `c = sum(s) / rank`.
        complete: give LAPACK's null directions the value `c`, too; see `polar_factor`.
        rtol: relative singular value at or below which a direction is null.
        accuracy: see `polar_factor`.

    >>> value, _ = isotropic(torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64), 2)
    >>> value.round(decimals=12).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    polar = polar_factor(total_OI, accuracy=accuracy, rtol=rtol, complete=complete)
    count = polar.rank.clamp_min(1) if mean == "rank" else torch.full_like(polar.rank, directions)
    level = polar.s_S.sum(-1) / count
    # A zero matrix has no directions: keep exact zeros, also where LAPACK would complete it to an isometry.
    return polar.factor_MN * level[..., None, None], polar
