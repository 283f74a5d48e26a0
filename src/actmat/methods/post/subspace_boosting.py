"""Subspace Boosting: raise the small singular values of a merged delta.

"Subspace Boosting" (arXiv:2506.16506): the more experts are merged, the fewer directions hold most of the merged delta.

Shapes: `O` out_features, `I` in_features, `K` singular directions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actmat.linalg.lapack import retry_stats
from actmat.linalg.lowrank import LowRank, orthogonal_core
from actmat.linalg.svd import ThinSVD, thin_svd
from actmat.methods.contract import Fraction
from actmat.methods.facets import Merged, MergedLowRank
from actmat.methods.post.contract import PostStep

__all__ = ["SUBSPACE_BOOSTING", "apply", "apply_lowrank"]


def apply(merged: Tensor, deltas: Sequence[Tensor], *, beta: Fraction = 0.01) -> Merged:
    """`D = U diag(s) V^T -> U diag(max(s, s_k)) V^T`, `k` the first index with `(s_1 + .. + s_k) / sum(s) >= beta`.

    Null directions stay null: the matrix does not determine the vectors that span them.

    Args:
        deltas: not looked at.
        beta: share of the sum of the singular values up to the one that the smaller are raised to. With 0.01 that is
            `s_1` wherever `s_1` exceeds 1 % of the sum: all values become the largest.

    >>> import torch
    >>> apply(torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])), [], beta=0.6).value.diagonal()
    tensor([4., 3., 3., 3.])
    """
    svd = thin_svd(merged)
    raised_K, stats = _raised(svd, beta)
    value = (svd.u_OK * raised_K.unsqueeze(-2)) @ svd.v_IK.mT
    return Merged(value.to(merged.dtype), stats)


def apply_lowrank(merged: LowRank, deltas: Sequence[LowRank], *, beta: float = 0.01) -> MergedLowRank:
    """The same on factors: only directions that the product has are raised. Exact, in float64."""
    core_PQ, left_OP, right_IQ = orthogonal_core(merged)
    core = thin_svd(core_PQ)
    raised_K, stats = _raised(core, beta)
    value = LowRank(left_OP @ (core.u_OK * raised_K.unsqueeze(-2)), (right_IQ @ core.v_IK).mT)
    return MergedLowRank(value.to(merged.b_OR.dtype), stats)


def _raised(svd: ThinSVD, beta: float) -> tuple[Tensor, dict[str, float | int | str]]:
    """Singular values with the small ones raised, zeros left at zero, and the record."""
    s_K = svd.s_K
    if not s_K.shape[-1] or not bool(s_K.any()):
        return s_K, {"boosted": 0}
    share_K = s_K.cumsum(-1) / s_K.sum(-1, keepdim=True).clamp_min(torch.finfo(s_K.dtype).tiny)
    # rounding may leave the last share below 1
    first = (share_K < beta).sum(-1, keepdim=True).clamp_max(s_K.shape[-1] - 1)
    level = s_K.gather(-1, first)
    on_K = s_K > 0
    raised_K = torch.where(on_K, torch.maximum(s_K, level), s_K)
    boosted = int((raised_K > s_K).sum())
    return raised_K, {"boosted": boosted, "boosted_to": float(level.max()), **retry_stats(svd.retries)}


SUBSPACE_BOOSTING = PostStep(
    name="subspace_boosting",
    summary="Raise the small singular values of the merged delta to one that beta of their sum reaches.",
    equation="D = U diag(s) V^T; s <- max(s, s_k), k = first index with cumsum(s) / sum(s) >= beta",
    reference="Subspace Boosting, arXiv:2506.16506, 2025",
    apply=apply,
    apply_lowrank=apply_lowrank,
)
