"""Steps that change every merged matrix by itself, through its singular values.

| step | source |
|---|---|
| `svc` | "Singular value calibration" (arXiv:2602.05536). A merged delta counts the directions that experts share once for every expert, and so overshoots along them. |
| `subspace_boosting` | "Subspace Boosting" (arXiv:2506.16506): the more experts are merged, the fewer directions hold most of the merged delta. |
| `isotropise` | D. Marczak et al., "No Task Left Behind: Isotropic Model Merging with Common and Task-Specific Subspaces", ICML 2025, as a step after any method; A. Panariello et al., "Accurate and Efficient Low-Rank Model Merging in Core Space", NeurIPS 2025, apply it to what a method gives in the core space. |
| `mean_norm` | The last step of Pico (Y. Tang and Y. Yang, "Crowded in B-Space", 2026, arXiv:2604.16826), by itself. |

Shapes: `T` experts, `O` out_features, `I` in_features, `K` singular directions, `P`, `Q` sides of a core.
"""  # noqa: E501 - rows of a table

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import torch
from torch import Tensor

from actmat.linalg.lapack import retry_stats
from actmat.linalg.lowrank import LowRank, orthogonal_core
from actmat.linalg.singular import Mean, Polar, isotropic
from actmat.linalg.svd import ThinSVD, thin_svd
from actmat.methods.contract import Bounds, Fraction
from actmat.methods.facets import Merged, MergedLowRank
from actmat.methods.post.contract import PostStep


def calibrate(
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
    >>> calibrate(2 * one, [one, one]).value
    tensor([[2., 0.],
            [0., 1.]])
    """
    svd = thin_svd(merged)
    responses = (svd.u_OK.mT @ delta.to(torch.float64) for delta in deltas)
    gain_K = _gain(svd, responses, alpha, floor)
    value = (svd.u_OK * (svd.s_K * gain_K).unsqueeze(-2)) @ svd.v_IK.mT
    return Merged(value.to(merged.dtype), _svc_stats(svd, gain_K))


def calibrate_lowrank(
    merged: LowRank, deltas: Sequence[LowRank], *, alpha: float = 1.0, floor: float = 0.0
) -> MergedLowRank:
    """The same on factors: a direction without a singular value stays without one. Exact, in float64."""
    core_PQ, left_OP, right_IQ = orthogonal_core(merged)
    core = thin_svd(core_PQ)
    svd = ThinSVD(left_OP @ core.u_OK, core.s_K, right_IQ @ core.v_IK, core.rank, core.retries)
    responses = ((svd.u_OK.mT @ d.b_OR.to(torch.float64)) @ d.a_RI.to(torch.float64) for d in deltas)
    gain_K = _gain(svd, responses, alpha, floor)
    value = LowRank(svd.u_OK * (svd.s_K * gain_K).unsqueeze(-2), svd.v_IK.mT)
    return MergedLowRank(value.to(merged.b_OR.dtype), _svc_stats(svd, gain_K))


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


def _svc_stats(svd: ThinSVD, gain_K: Tensor) -> dict[str, float | int | str]:
    on_K = svd.s_K > 0
    found = gain_K[on_K]
    gains = {"svc_gain_min": float(found.min()), "svc_gain_max": float(found.max())} if found.numel() else {}
    return {"svc_rank": int(svd.rank.max()), **gains, **retry_stats(svd.retries)}


SVC = PostStep(
    name="svc",
    summary="Shorten each singular direction of the merged delta by how often the experts count it.",
    equation="D = U diag(s) V^T; s_r <- s_r T / sum_t max(alpha, <u_r^T D, u_r^T D_t> / ||u_r^T D_t||^2)",
    reference="Singular value calibration, arXiv:2602.05536, 2026",
    apply=calibrate,
    apply_lowrank=calibrate_lowrank,
)


def boost(merged: Tensor, deltas: Sequence[Tensor], *, beta: Fraction = 0.01) -> Merged:
    """`D = U diag(s) V^T -> U diag(max(s, s_k)) V^T`, `k` the first index with `(s_1 + .. + s_k) / sum(s) >= beta`.

    Null directions stay null: the matrix does not determine the vectors that span them.

    Args:
        deltas: not looked at.
        beta: share of the sum of the singular values up to the one that the smaller are raised to. With 0.01 that is
            `s_1` wherever `s_1` exceeds 1 % of the sum: all values become the largest.

    >>> import torch
    >>> boost(torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])), [], beta=0.6).value.diagonal()
    tensor([4., 3., 3., 3.])
    """
    svd = thin_svd(merged)
    raised_K, stats = _raised(svd, beta)
    value = (svd.u_OK * raised_K.unsqueeze(-2)) @ svd.v_IK.mT
    return Merged(value.to(merged.dtype), stats)


def boost_lowrank(merged: LowRank, deltas: Sequence[LowRank], *, beta: float = 0.01) -> MergedLowRank:
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
    apply=boost,
    apply_lowrank=boost_lowrank,
)


def isotropise(merged: Tensor, deltas: Sequence[Tensor], *, mean: Mean = "all") -> Merged:
    """`D = U diag(s) V^T -> mean(s) U V^T`. Null directions stay null.

    Args:
        deltas: not looked at.
        mean: "all" divides the sum of the singular values by `min(O, I)`, in the core space by the smaller side of the
            core; "rank" by the numerical rank; "rms" takes the root of their mean square over `min(O, I)`.

    >>> import torch
    >>> isotropise(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), []).value
    tensor([[2., 0.],
            [0., 2.]])
    """
    value, polar = isotropic(merged, min(merged.shape[-2:]), mean=mean)
    return Merged(value.to(merged.dtype), _isotropise_stats(polar))


def isotropise_lowrank(merged: LowRank, deltas: Sequence[LowRank], *, mean: Mean = "all") -> MergedLowRank:
    """The same on factors; the mean is over `min(O, I)` of the full shape. Exact, in float64."""
    core_PQ, left_OP, right_IQ = orthogonal_core(merged)
    value_PQ, polar = isotropic(core_PQ, min(merged.shape[-2:]), mean=mean)
    value = LowRank(left_OP @ value_PQ, right_IQ.mT)
    return MergedLowRank(value.to(merged.b_OR.dtype), _isotropise_stats(polar))


def _isotropise_stats(polar: Polar) -> dict[str, float | int | str]:
    return {"isotropic_rank": int(polar.rank.max()), **retry_stats(polar.retries)}


ISOTROPISE = PostStep(
    name="isotropise",
    summary="Replace all singular values of the merged delta by their mean.",
    equation="D = U diag(s) V^T; D* = mean(s) U V^T",
    reference="Marczak et al., No Task Left Behind, ICML 2025; Panariello et al., Core Space, NeurIPS 2025",
    apply=isotropise,
    apply_lowrank=isotropise_lowrank,
)


def at_mean_norm(merged: Tensor, deltas: Sequence[Tensor]) -> Merged:
    """`D (mean_t ||D_t|| / ||D||)`, over the experts that change the matrix; a zero delta stays zero.

    >>> import torch
    >>> at_mean_norm(torch.tensor([[3.0, 4.0]]), [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])]).value.norm()
    tensor(2.)
    """
    gain = _to_mean([torch.linalg.matrix_norm(m.to(torch.float64)) for m in (merged, *deltas)])
    return Merged(merged * gain[..., None, None].to(merged.dtype), _gain_stats(gain))


def at_mean_norm_lowrank(merged: LowRank, deltas: Sequence[LowRank]) -> MergedLowRank:
    """The same on factors, whose `b` takes the gain. Exact, in float64."""
    gain = _to_mean([torch.linalg.matrix_norm(orthogonal_core(m)[0]) for m in (merged, *deltas)])
    b_OR = merged.b_OR * gain[..., None, None].to(merged.b_OR.dtype)
    return MergedLowRank(LowRank(b_OR, merged.a_RI), _gain_stats(gain))


def _to_mean(norms: Sequence[Tensor]) -> Tensor:
    """The mean of the norms but the first that are not zero, by the first; 1 where it is zero."""
    norm, own = norms[0], torch.stack(list(norms[1:]))
    mean = own.sum(0) / (own > 0).sum(0).clamp(min=1)
    return torch.where(norm > 0, mean / norm.clamp(min=_SMALLEST), 1.0)


def _gain_stats(gain: Tensor) -> dict[str, float | int | str]:
    return {"gain_min": float(gain.min()), "gain_max": float(gain.max())}


MEAN_NORM = PostStep(
    name="mean_norm",
    summary="Give every merged matrix the mean norm of the experts' deltas.",
    equation="D* = D mean_t ||D_t|| / ||D||",
    reference="The last step of Pico: Tang and Yang, Crowded in B-Space, arXiv:2604.16826, 2026",
    apply=at_mean_norm,
    apply_lowrank=at_mean_norm_lowrank,
)
