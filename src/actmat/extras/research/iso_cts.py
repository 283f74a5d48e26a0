"""Method `iso_cts`.

Shapes: `T` experts, `O` out_features, `I` in_features, `C` common directions, `K` task directions per expert,
`J = C + T K <= min(O, I)`, `R` rank of a factor pair, `P, Q` ranks of the common bases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.linalg.inner import one_pass_sum
from actmat.linalg.lapack import retry_stats
from actmat.linalg.singular import join_parts, orthogonalized_sum
from actmat.linalg.svd import RANK_RTOL, ThinSVD, accuracy_of, svd_workspace, thin_svd
from actmat.methods._shared.per_matrix import KnownShape, in_cores
from actmat.methods.contract import Fraction, MergeMethod, Weights
from actmat.methods.facets import LINEAR_LAWS, Merged, MethodCost


def merge(
    deltas: Sequence[Tensor],
    shape: KnownShape = None,
    *,
    weights: Weights = None,
    common_fraction: Fraction = 0.8,
    rtol: Fraction = RANK_RTOL,
) -> Merged:
    """Iso-C on a common subspace plus the leading directions of what each expert has outside it.

        D* = mean(s) polar([U_1 .. U_T U_c]) polar([V_1 .. V_T V_c])^T,
        s = [s_1 .. s_T s_c]

    `U_c, s_c, V_c` are the top `C` triplets of `sum_t w_t D_t`; `U_t, s_t, V_t` the top `K` triplets of `w_t (D_t - U_c
    U_c^T D_t)`; `C + T K` is `min(O, I)` (see `split_directions`). Directions that the deltas do not determine (common
    ones beyond the rank of the sum, task ones beyond the rank of a residual) are left at zero, where the published code
    takes LAPACK's null-space vectors; the mean is over `C + T K` values either way. With deltas of full rank both
    agree.

    Args:
        common_fraction: share of the `min(O, I)` directions that is common.
        rtol: singular values at or below `rtol` times the largest one of the sum (`||D_t||_F` for the residual of
            expert t) count as zero.

    Source:
        D. Marczak, S. Magistri, S. Cygert, B. Twardowski, A. D. Bagdanov, J. van de Weijer, "No Task Left Behind:
        Isotropic Model Merging with Common and Task-Specific Subspaces", ICML 2025, arXiv:2502.04959.
    """
    shares = [1.0] * len(deltas) if weights is None else list(weights)
    total_OI = one_pass_sum(deltas, shares)
    n_common, n_task = split_directions(min((shape or total_OI.shape)[-2:]), len(deltas), common_fraction)
    common = thin_svd(total_OI, k=n_common, rtol=rtol)
    common_OC = common.u_OK.to(total_OI.dtype)
    parts: list[ThinSVD] = []
    for delta_OI, weight in zip(deltas, shares, strict=True) if n_task else ():
        rest_OI = delta_OI - common_OC @ (common_OC.mT @ delta_OI)
        # The residual of a delta inside the common space is rounding: judge it by the delta, not by itself.
        floor = rtol * torch.linalg.vector_norm(delta_OI, dim=(-2, -1), dtype=torch.float64)
        parts.append(thin_svd(rest_OI, k=n_task, rtol=rtol, floor=floor).scaled(weight))
    u_OJ, s_J, v_IJ = join_parts([*parts, common])
    level = s_J.sum(-1, keepdim=True) / (n_common + n_task * len(deltas))
    left_OJ, right_JI, retries = orthogonalized_sum(u_OJ, level.expand_as(s_J), v_IJ, accuracy_of(total_OI))
    decomposed = (common, *parts)
    stats: dict[str, float | int | str | bool] = {
        "common": n_common,
        "per_expert": n_task,
        "common_rank_min": int(common.rank.min()),
        **retry_stats((*retries, *(name for p in decomposed for name in p.retries))),
    }
    return Merged(left_OJ.to(total_OI.dtype) @ right_JI.to(total_OI.dtype), stats)


def split_directions(directions: int, n_experts: int, common_fraction: float) -> tuple[int, int]:
    """`(C, K)`: common directions, and task directions per expert, with `C + T K = p = directions`.

    `T K = round((p - int(fraction p)) / T) T` (half to even), and never more than `p` allows.
    """
    rest = directions - int(directions * common_fraction)
    per_expert = min(round(rest / n_experts), directions // n_experts)
    return directions - per_expert * n_experts, per_expert


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, rows, columns = shape
    short = min(rows, columns)
    # The sum, a residual and its projection; all triplets in float64 as parts, side by side and as polar factors.
    decompose = 4 * rows * columns + 2 * short * (rows + columns) + svd_workspace(rows, columns)
    orthogonalize = 2 * rows * columns + 7 * short * (rows + columns) + 12 * short * short
    return math.prod(batch) * max(decompose, orthogonalize)


ISO_CTS = MergeMethod(
    "iso_cts",
    merge,
    "matrix",
    laws=LINEAR_LAWS,
    lowrank=in_cores(merge),
    cost=MethodCost(workspace=_workspace, products=lambda options: (3, 15)),
    elsewhere=lambda options, n_experts: "share",  # the authors' mean; the weights are factors in the method
)
