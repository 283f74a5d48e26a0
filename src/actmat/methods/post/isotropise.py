"""Isotropise: all singular values of a merged delta become their mean.

D. Marczak et al., "No Task Left Behind: Isotropic Model Merging with Common and Task-Specific Subspaces", ICML 2025, as
a step after any method; A. Panariello et al., "Accurate and Efficient Low-Rank Model Merging in Core Space", NeurIPS
2025, apply it to what a method gives in the core space.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actmat.linalg.lapack import retry_stats
from actmat.linalg.lowrank import LowRank, orthogonal_core
from actmat.linalg.singular import Mean, Polar, isotropic
from actmat.methods.facets import Merged, MergedLowRank
from actmat.methods.post.contract import PostStep

__all__ = ["ISOTROPISE", "apply", "apply_lowrank"]


def apply(merged: Tensor, deltas: Sequence[Tensor], *, mean: Mean = "all") -> Merged:
    """`D = U diag(s) V^T -> mean(s) U V^T`. Null directions stay null.

    Args:
        deltas: not looked at.
        mean: "all" divides the sum of the singular values by `min(O, I)`, in the core space by the smaller side of the
            core; "rank" by the numerical rank; "rms" takes the root of their mean square over `min(O, I)`.

    >>> import torch
    >>> apply(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), []).value
    tensor([[2., 0.],
            [0., 2.]])
    """
    value, polar = isotropic(merged, min(merged.shape[-2:]), mean=mean)
    return Merged(value.to(merged.dtype), _stats(polar))


def apply_lowrank(merged: LowRank, deltas: Sequence[LowRank], *, mean: Mean = "all") -> MergedLowRank:
    """The same on factors; the mean is over `min(O, I)` of the full shape. Exact, in float64."""
    core_PQ, left_OP, right_IQ = orthogonal_core(merged)
    value_PQ, polar = isotropic(core_PQ, min(merged.shape[-2:]), mean=mean)
    value = LowRank(left_OP @ value_PQ, right_IQ.mT)
    return MergedLowRank(value.to(merged.b_OR.dtype), _stats(polar))


def _stats(polar: Polar) -> dict[str, float | int | str]:
    return {"isotropic_rank": int(polar.rank.max()), **retry_stats(polar.retries)}


ISOTROPISE = PostStep(
    name="isotropise",
    summary="Replace all singular values of the merged delta by their mean.",
    equation="D = U diag(s) V^T; D* = mean(s) U V^T",
    reference="Marczak et al., No Task Left Behind, ICML 2025; Panariello et al., Core Space, NeurIPS 2025",
    apply=apply,
    apply_lowrank=apply_lowrank,
)
