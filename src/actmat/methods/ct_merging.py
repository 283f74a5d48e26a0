"""Method `ct_merging`.

Shapes: `T` experts, `O` out_features, `I` in_features, `K` directions of each expert, `C` common directions,
`J = T K` directions of all, `M = C + J`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from actmat.linalg.singular import join_parts, orthogonalized_sum
from actmat.linalg.svd import RANK_RTOL, MatrixForm, accuracy_of, svd_workspace, thin_svd
from actmat.methods._shared.per_matrix import KnownShape, OneMatrix, each_matrix, in_cores
from actmat.methods.contract import Bounds, Fraction, MergeMethod
from actmat.methods.facets import LINEAR_LAWS, Merged, MethodCost

TIE = 1e-4
"""Relative gap below which two singular values count as one: directions of float32 deltas are no more accurate."""


def merge(
    deltas: Sequence[MatrixForm],
    shape: KnownShape = None,
    *,
    k: Annotated[int, Bounds(low=1)] = 16,
    common: Annotated[int, Bounds(low=0)] = 4,
    rtol: Fraction = RANK_RTOL,
) -> Merged:
    """Output directions that the experts share, and each expert's others, with one size per part.

        D* = polar([L_c L_1 .. L_T]) diag(c_c, c_1, .., c_T) polar([R_c R_1 .. R_T])^T
        L_c = U_c P,   R_c = Q,   c_c = rms(S_c),   P S_c Q^T = mean_t U_c^T D_t
        L_t = (I - U_c U_c^T) U_t,   R_t = V_t,   c_t = rms(S_t)

    `U_t, S_t, V_t` are the top `k` triplets of `D_t`, and `U_c` the leading left singular vectors of `[U_1 .. U_T]`:
    fewer than `common` where the cut would split equal singular values, whose vectors the matrix does not determine.
    A direction of an expert inside the common space is left out on both sides. Directions beyond a numerical rank
    are left at zero and do not count in a root mean square.

    Args:
        k: directions of each expert.
        common: directions of the outputs that are common.
        rtol: singular values at or below `rtol` times the largest one count as zero.

    Source:
        "CT-Merging", arXiv:2607.20561; written from a third party's code.
    """
    value, stats = each_matrix(partial(_merge, k=k, common=common, rtol=rtol), deltas)
    return Merged(value.to(deltas[0].dtype), stats)


def _merge(deltas: Sequence[MatrixForm], *, k: int, common: int, rtol: float) -> OneMatrix:
    """One matrix, in float64; `deltas` may be small cores."""
    accuracy, parts = accuracy_of(deltas[0]), [thin_svd(delta, k=min(k, *delta.shape), rtol=rtol) for delta in deltas]
    u_OJ, s_J, v_IJ = join_parts(parts)
    joint = thin_svd(u_OJ, rtol=rtol, accuracy=accuracy)
    n_common = _untied(joint.s_K, min(common, int(joint.rank)))
    common_OC = joint.u_OK[:, :n_common]
    shared = thin_svd((common_OC.mT @ u_OJ * s_J) @ v_IJ.mT / len(deltas), rtol=rtol)
    rest_OJ = u_OJ - common_OC @ (common_OC.mT @ u_OJ)
    kept_J = torch.linalg.vector_norm(rest_OJ, dim=0) > TIE
    left_OM = torch.cat([common_OC @ shared.u_OK, rest_OJ * kept_J], -1)
    right_IM = torch.cat([shared.v_IK, v_IJ * kept_J], -1)
    sizes_M = torch.cat([part.s_K.new_full(part.s_K.shape, _rms(part.s_K)) for part in (shared, *parts)])
    left_OM, right_MI, retries = orthogonalized_sum(left_OM, sizes_M, right_IM, accuracy)
    retries += joint.retries + shared.retries + tuple(name for part in parts for name in part.retries)
    return OneMatrix(left_OM @ right_MI, {"common_min": n_common}, retries)


def _untied(s_K: Tensor, wanted: int) -> int:
    """The largest number up to `wanted` that splits no equal singular values.

    >>> _untied(torch.tensor([1.4, 1.0, 1.0, 1.0]), 2), _untied(torch.tensor([1.4, 1.2, 1.0]), 2)
    (1, 2)
    """
    while wanted and wanted < len(s_K) and s_K[wanted - 1] - s_K[wanted] <= TIE * s_K[0]:
        wanted -= 1
    return wanted


def _rms(s_K: Tensor) -> float:
    return float(s_K.norm()) / math.sqrt(max(1, int(s_K.count_nonzero())))


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, rows, columns = shape
    joint: int = n_experts * min(options["k"], rows, columns) + options["common"]
    # In float64, two elements each: the triplets as parts, side by side, without the common part, and as polar factors.
    return 12 * joint * (rows + columns + joint) + svd_workspace(rows, columns) + 3 * math.prod(batch) * rows * columns


CT_MERGING = MergeMethod(
    "ct_merging",
    merge,
    "matrix",
    laws=LINEAR_LAWS,
    lowrank=in_cores(merge, factored=True),
    cost=MethodCost(workspace=_workspace, products=lambda options: (1, 6)),
)
