"""What a spectrum says about a matrix, and how two subspaces lie to each other.

Shapes: `S` singular values, `N` ambient dimension, `P`, `Q` dimensions of two subspaces, `K = min(P, Q)`.
Leading batch axes are allowed; results have the batch shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actmat.linalg.lapack import only_singular_values
from actmat.linalg.svd import RANK_RTOL, numerical_range

__all__ = [
    "effective_rank",
    "numerical_rank",
    "principal_angles",
    "stable_rank",
    "subspace_overlap",
]


def numerical_rank(s_S: Tensor, rtol: float = RANK_RTOL) -> Tensor:
    """Number of singular values above `rtol * s_1` (int64)."""
    return numerical_range(s_S, rtol)[1]


def effective_rank(s_S: Tensor) -> Tensor:
    """`exp(-sum_i p_i log p_i)` with `p_i = s_i / sum_j s_j`: between 1 and the rank, 0 for a zero matrix.

    O. Roy, M. Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.
    """
    total = s_S.sum(-1, keepdim=True)
    share_S = s_S / torch.where(total > 0, total, 1.0)
    entropy = torch.special.entr(share_S).sum(-1)
    return torch.where(total.squeeze(-1) > 0, entropy.exp(), 0.0)


def stable_rank(s_S: Tensor) -> Tensor:
    """`||A||_F^2 / ||A||_2^2 = sum_i s_i^2 / s_1^2`: at most the rank, 0 for a zero matrix.

    M. Rudelson, R. Vershynin, "Sampling from large matrices", J. ACM 54(4), 2007.
    """
    largest = s_S.amax(-1, keepdim=True)
    return (s_S / torch.where(largest > 0, largest, 1.0)).square().sum(-1)


def principal_angles(a_NP: Tensor, b_NQ: Tensor) -> Tensor:
    """Angles between the column spaces of `a` and `b`, ascending, in radians, `K` of them, float64.

    `a` and `b` must have full column rank. Angles below 45 degrees come from their sine, the others from their
    cosine, because `acos` of a number near 1 loses half of the digits.

    A. Knyazev, M. Argentati, "Principal angles between subspaces in an A-based scalar product", SIAM J. Sci. Comput.
    23(6), 2002, algorithm 3.1.
    """
    p_NP = torch.linalg.qr(a_NP.to(torch.float64)).Q
    q_NQ = torch.linalg.qr(b_NQ.to(torch.float64)).Q
    if p_NP.shape[-1] < q_NQ.shape[-1]:
        p_NP, q_NQ = q_NQ, p_NP
    core_PK = p_NP.mT @ q_NQ
    cosine_K = only_singular_values(core_PK)[0].clamp_max(1)
    sine_K = only_singular_values(q_NQ - p_NP @ core_PK)[0].flip(-1).clamp_max(1)
    return torch.where(cosine_K.square() > 0.5, sine_K.asin(), cosine_K.acos())


def subspace_overlap(a_NP: Tensor, b_NQ: Tensor) -> Tensor:
    """`||P^T Q||_F^2 / K`, the mean squared cosine of the principal angles: 0 orthogonal, 1 nested.

    `P` and `Q` are orthonormal bases of the column spaces of `a` and `b`, which must have full column rank.
    """
    p_NP = torch.linalg.qr(a_NP.to(torch.float64)).Q
    q_NQ = torch.linalg.qr(b_NQ.to(torch.float64)).Q
    core_PQ: Tensor = p_NP.mT @ q_NQ
    return torch.sum(core_PQ.square(), dim=(-2, -1)) / min(core_PQ.shape[-2:])
