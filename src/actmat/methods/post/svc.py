"""SVC: singular value calibration of a merged delta, by the experts' components along its directions.

"Singular value calibration" (arXiv:2602.05536). A merged delta counts the directions that experts share once for every
expert, and so overshoots along them.

Shapes: `T` experts, `O` out_features, `I` in_features, `K` singular directions, `P`, `Q` sides of a core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import torch
from torch import Tensor

from actmat.linalg.lapack import retry_stats
from actmat.linalg.lowrank import LowRank, orthogonal_core
from actmat.linalg.svd import ThinSVD, thin_svd
from actmat.methods.contract import Bounds
from actmat.methods.facets import Merged, MergedLowRank
from actmat.methods.post.contract import PostStep

__all__ = ["SVC", "apply", "apply_lowrank"]


def apply(
    merged: Tensor,
    deltas: Sequence[Tensor],
    *,
    alpha: Annotated[float, Bounds(low=0, open_low=True)] = 1.0,
    floor: Annotated[float, Bounds(low=0)] = 0.0,
) -> Merged:
    """`D = U diag(s) V^T -> U diag(g s) V^T`, `g_r = T / sum_t max(alpha, <a_r, a_rt> / ||a_rt||^2)`.

    `a_r = u_r^T D` is the response of the merged delta along `u_r`, `a_rt = u_r^T D_t` that of expert `t`. With
    `alpha = 1` no direction becomes longer. An expert without a response along `u_r` counts `alpha`.

    Args:
        alpha: smallest ratio that an expert counts with; 1 after a sum, 0.1 in the authors' experiments after task
            arithmetic and means.
        floor: smallest `||a_rt||^2` that is divided by. With 0 the step commutes with scaling all deltas; public code
            has an absolute 1e-12, which very small deltas fall below.

    >>> import torch
    >>> one = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    >>> apply(2 * one, [one, one]).value
    tensor([[2., 0.],
            [0., 1.]])
    """
    svd = thin_svd(merged)
    responses = (svd.u_OK.mT @ delta.to(torch.float64) for delta in deltas)
    gain_K = _gain(svd, responses, alpha, floor)
    value = (svd.u_OK * (svd.s_K * gain_K).unsqueeze(-2)) @ svd.v_IK.mT
    return Merged(value.to(merged.dtype), _stats(svd, gain_K))


def apply_lowrank(
    merged: LowRank, deltas: Sequence[LowRank], *, alpha: float = 1.0, floor: float = 0.0
) -> MergedLowRank:
    """The same on factors: a direction without a singular value stays without one. Exact, in float64."""
    core_PQ, left_OP, right_IQ = orthogonal_core(merged)
    core = thin_svd(core_PQ)
    svd = ThinSVD(left_OP @ core.u_OK, core.s_K, right_IQ @ core.v_IK, core.rank, core.retries)
    responses = ((svd.u_OK.mT @ d.b_OR.to(torch.float64)) @ d.a_RI.to(torch.float64) for d in deltas)
    gain_K = _gain(svd, responses, alpha, floor)
    value = LowRank(svd.u_OK * (svd.s_K * gain_K).unsqueeze(-2), svd.v_IK.mT)
    return MergedLowRank(value.to(merged.b_OR.dtype), _stats(svd, gain_K))


def _gain(svd: ThinSVD, responses: Iterable[Tensor], alpha: float, floor: float) -> Tensor:
    """Factor of each singular value.

    Args:
        responses: per expert, `u^T D_t` (`K x I`), one alive at a time.
    """
    count, total_K = 0, torch.zeros_like(svd.s_K)
    for response_KI in responses:
        inner_K = (response_KI * svd.v_IK.mT).sum(-1) * svd.s_K
        square_K = response_KI.square().sum(-1)
        # a response whose square underflows is none
        ratio_K = torch.where(square_K > 0, inner_K / square_K.clamp_min(max(floor, _SMALLEST)), 0.0)
        total_K += ratio_K.clamp_min(alpha)
        count += 1
    return count / total_K


_SMALLEST = torch.finfo(torch.float64).tiny


def _stats(svd: ThinSVD, gain_K: Tensor) -> dict[str, float | int | str]:
    on_K = svd.s_K > 0
    found = gain_K[on_K]
    gains = {"svc_gain_min": float(found.min()), "svc_gain_max": float(found.max())} if found.numel() else {}
    return {"svc_rank": int(svd.rank.max()), **gains, **retry_stats(svd.retries)}


SVC = PostStep(
    name="svc",
    summary="Shorten each singular direction of the merged delta by how often the experts count it.",
    equation="D = U diag(s) V^T; s_r <- s_r T / sum_t max(alpha, <u_r^T D, u_r^T D_t> / ||u_r^T D_t||^2)",
    reference="Singular value calibration, arXiv:2602.05536, 2026",
    apply=apply,
    apply_lowrank=apply_lowrank,
)
