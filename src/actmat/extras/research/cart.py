"""Method `cart`.

Shapes: `T` experts, `O` out_features, `I` in_features, `K` directions kept per expert, `P, Q` ranks of the common
bases of low-rank deltas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from actmat.linalg.inner import one_pass_sum
from actmat.linalg.lapack import Retries, retry_stats
from actmat.linalg.svd import RANK_RTOL, svd_workspace, thin_svd
from actmat.methods._shared.per_matrix import KnownShape, in_cores
from actmat.methods.contract import Bounds, Fraction, MergeMethod
from actmat.methods.facets import MEAN_LAWS, Merged, MethodCost

Rounding = Literal["down", "up"]


def merge(
    deltas: Sequence[Tensor],
    shape: KnownShape = None,
    *,
    rank: Fraction = 0.08,
    scaling: Annotated[float, Bounds(low=0)] = 1.0,
    rounding: Rounding = "down",
    rtol: Fraction = RANK_RTOL,
) -> Merged:
    """Average plus the leading directions in which each expert differs from it.

        D* = N + scaling sum_t SVD_K(D_t - N),   N = sum_t D_t / T,
        K = max(1, floor(rank min(O, I)))

    The tasks' directions are cleaner around the average than around the base.

    Args:
        rank: share of the directions that is kept of each expert's distance from the average.
        scaling: factor of the sum (not the mean) of the kept directions.
        rounding: "down" as in the code of the authors' group; "up" (without the least of one) as in Core Space's.
        rtol: directions at or below `rtol ||D_t||` count as zero.

    Source:
        J. Choi et al., "Revisiting Weight Averaging for Model Merging", 2024, arXiv:2412.12153.
    """
    directions = kept_directions(shape or deltas[0].shape, rank, rounding)
    mean_OI = one_pass_sum(deltas, [1 / len(deltas)] * len(deltas))
    out_OI, retries, largest = mean_OI.clone(), Retries(), 0
    for delta_OI in deltas:
        # The distance of an expert from an average of equal ones is rounding: judge it by the delta, not by itself.
        floor = rtol * torch.linalg.vector_norm(delta_OI, dim=(-2, -1), dtype=torch.float64)
        part = thin_svd(delta_OI - mean_OI, k=directions, rtol=rtol, floor=floor)
        left_OK = (part.u_OK * (scaling * part.s_K).unsqueeze(-2)).to(out_OI.dtype)
        out_OI += left_OK @ part.v_IK.mT.to(out_OI.dtype)
        retries += part.retries
        largest = max(largest, int(part.rank.clamp_max(directions).max())) if part.rank.numel() else largest
    return Merged(out_OI, {"k": directions, "rank_max": largest, **retry_stats(retries)})


def kept_directions(shape: Sequence[int], rank: float, rounding: Rounding) -> int:
    """`K`: directions kept of each expert.

    >>> kept_directions((24, 36), 0.16, "down"), kept_directions((24, 36), 0.16, "up")
    (3, 4)
    """
    wanted = rank * min(shape[-2:])
    return math.ceil(wanted) if rounding == "up" else max(1, int(wanted))


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, rows, columns = shape
    directions = min(kept_directions(shape, options["rank"], options["rounding"]), *shape[-2:])
    # The mean, the result, a distance and a product; triplets in float64 and in the compute dtype.
    of_one = 4 * rows * columns + 5 * directions * (rows + columns) + svd_workspace(rows, columns)
    return math.prod(batch) * of_one


CART = MergeMethod(
    "cart",
    merge,
    "matrix",
    laws=MEAN_LAWS,
    lowrank=in_cores(merge),
    cost=MethodCost(workspace=_workspace, products=lambda options: (2, 0)),
)
