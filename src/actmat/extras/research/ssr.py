"""Method `ssr`.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank of the joint row space, `N`
in_features of a layer whose cores are given.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from actmat.extras.research.joint import joint_basis
from actmat.linalg.lapack import eigh, retry_stats
from actmat.linalg.lowrank import common_bases
from actmat.linalg.svd import RANK_RTOL, svd_workspace
from actmat.methods._shared.per_matrix import in_cores
from actmat.methods.contract import Bounds, MergeMethod
from actmat.methods.facets import Merged, MethodCost


def merge(
    deltas: Sequence[Tensor],
    rows_NI: Tensor | None = None,
    *,
    statistics: Mapping[str, Sequence[Tensor]],
    ridge: Annotated[float, Bounds(0)] = 1e-4,
) -> Merged:
    """Least squares on every layer's outputs within the span of the experts' rows (of LoRA, of all A).

        D* = (sum_t D_t G_t V) (V^T G V + ridge m I)^+ V^T,   G = sum_t G_t

    The columns of `V` span the rows of all deltas (of adapters, of all `A_t`), `m` is the mean eigenvalue of `V^T G V`.
    With `ridge=0` it minimizes `sum_t E ||(D - D_t) z_t||^2` over all `D` whose rows lie in that span; `regmean`
    minimizes it over all `D`. The statistics that it needs are `V^T G_t V`, of the size of the ranks. float64 inside.

    Args:
        rows_NI: basis in which the deltas are given, for the low-rank form: cores instead of deltas.
        ridge: of the system, in units of its mean eigenvalue. In the authors' code it is absolute, and the basis is
            that of the stored `A_t`.

    Source:
        Z. Wei et al., "SSR-Merge: Subspace Signal Routing for Training-Free LoRA Merging in Diffusion Models", ICML
        2026, arXiv:2606.10617.
    """
    grams = [g.to(torch.float64) for g in statistics["gram"]]
    if rows_NI is not None:
        grams = [rows_NI.mT @ g @ rows_NI for g in grams]
    basis = joint_basis([d.mT for d in deltas])
    v_IR, on_R = basis.u_OR, basis.on_R
    seen_TIR = [gram_II @ v_IR for gram_II in grams]
    pairs = zip(deltas, seen_TIR, strict=True)
    right_OR = functools.reduce(torch.add, (delta_OI.to(torch.float64) @ seen_IR for delta_OI, seen_IR in pairs))
    system_RR = functools.reduce(torch.add, (v_IR.mT @ seen_IR for seen_IR in seen_TIR))
    values_R, vectors_RR, retries = eigh((system_RR + system_RR.mT) / 2)
    level = values_R.clamp(min=0).sum(-1, keepdim=True) / on_R.sum(-1, keepdim=True).clamp(min=1)
    top = values_R[..., -1:] if values_R.shape[-1] else level
    kept_R = values_R > RANK_RTOL**2 * top  # squares of what counts as a direction
    inverse_R = torch.where(kept_R, values_R + ridge * level, torch.inf).reciprocal()
    value_OI = (right_OR @ (vectors_RR * inverse_R.unsqueeze(-2))) @ vectors_RR.mT @ v_IR.mT
    stats: dict[str, int | str] = {"rank_max": v_IR.shape[-1], **retry_stats([*basis.retries, *retries])}
    return Merged(value_OI.to(deltas[0].dtype), stats)


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, n_out, n_in = shape
    return math.prod(batch) * (svd_workspace(n_in, n_in) + 8 * n_in * n_in + 8 * n_out * n_in)


SSR = MergeMethod(
    "ssr",
    merge,
    "matrix",
    laws=frozenset({"permutation", "homogeneous", "odd", "left_orthogonal", "zeros"}),
    lowrank=in_cores(merge, site_of=lambda deltas: ((bases := common_bases(deltas)), bases.right.dense())),
    cost=MethodCost(workspace=_workspace, products=lambda options: (4, 6)),
    needs_statistics=("gram",),
)
