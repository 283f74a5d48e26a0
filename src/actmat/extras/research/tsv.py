"""Method `tsv`.

Shapes: `T` experts, `O` out_features, `I` in_features, `K` directions kept per expert, `J = T K` of all, `R` rank
of a factor pair, `P, Q` ranks of the common bases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from actmat.linalg.lapack import retry_stats
from actmat.linalg.singular import join_parts, orthogonalized_sum, slots_per_expert, trim_parts
from actmat.linalg.svd import (
    RANK_RTOL,
    MatrixForm,
    ThinSVD,
    accuracy_of,
    orthogonal_svd,
    svd_workspace,
    thin_svd,
)
from actmat.methods._shared.per_matrix import KnownShape, in_cores
from actmat.methods.contract import Bounds, Fraction, MergeMethod, Weights
from actmat.methods.facets import Access, Merged, MethodCost

_NEEDS_NULL_SPACE = (
    "tsv: rank_aware=False asks for null-space vectors of the full matrices, which low-rank factors do not have; merge "
    "the dense deltas, or leave rank_aware at True"
)


def merge(
    deltas: Sequence[MatrixForm],
    shape: KnownShape = None,
    *,
    weights: Weights = None,
    k: Annotated[int | None, Bounds(low=0)] = None,
    min_k: Annotated[int, Bounds(low=0)] = 0,
    rank_aware: bool = True,
    rtol: Fraction = RANK_RTOL,
) -> Merged:
    """Top singular vectors of every expert, orthogonalized across experts (TSV-M).

        D* = polar([U_1 .. U_T]) diag(s_1 .. s_T) polar([V_1 .. V_T])^T

    The top `K = floor(min(O, I) / T)` triplets of each `w_t D_t` are kept, as many as fit side by side, and the vectors
    of different experts are made orthogonal to each other. With more experts than `min(O, I)` the published `K` is zero
    and the result is a zero delta (the layer keeps its base weights); `min_k=1` keeps the leading direction of every
    expert instead.

    Args:
        k: directions kept per expert, instead of `floor(min(O, I) / T)`.
        min_k: smallest number of directions kept per expert when `k` is not given.
        rank_aware: keep no more directions of an expert than its numerical rank. Without it, the null-space vectors
            that LAPACK happens to return enter the orthogonalization, and the result depends on the LAPACK.
        rtol: singular values at or below `rtol` times the largest one of the expert count as zero.

    Source:
        A. A. Gargiulo, D. Crisostomi, M. S. Bucarelli, S. Scardapane, F. Silvestri, E. Rodolà, "Task Singular Vectors:
        Reducing Task Interference in Model Merging", CVPR 2025, arXiv:2412.00081.
    """
    parts: list[ThinSVD] = []
    shares = [1.0] * len(deltas) if weights is None else weights
    for delta_OI, weight in zip(deltas, shares, strict=True):
        slots = _slots(shape or delta_OI.shape, len(deltas), k, min_k)
        if slots == 0:
            return Merged(torch.zeros(delta_OI.shape, dtype=delta_OI.dtype), {"k": 0, "rank_min": 0, "rank_max": 0})
        parts.append(_triplets(delta_OI, slots, rank_aware, rtol).scaled(weight))
    assert parts, "a merge has at least one expert"
    left_OJ, right_JI, retries = orthogonalized_sum(*join_parts(trim_parts(parts)), accuracy=accuracy_of(delta_OI))
    rank_T = torch.stack([p.rank.clamp_max(slots) for p in parts])
    ranks = {"rank_min": int(rank_T.min()), "rank_max": int(rank_T.max())}
    retries += tuple(name for part in parts for name in part.retries)
    merged_OI = left_OJ.to(delta_OI.dtype) @ right_JI.to(delta_OI.dtype)
    return Merged(merged_OI, {"k": slots, **ranks, **retry_stats(retries)})


def _slots(shape: Sequence[int], n_experts: int, k: int | None, min_k: int) -> int:
    wanted = max(slots_per_expert(shape, n_experts), min_k) if k is None else k
    return min(wanted, *shape[-2:])


def _triplets(delta_OI: MatrixForm, slots: int, rank_aware: bool, rtol: float) -> ThinSVD:
    if rank_aware:
        return thin_svd(delta_OI, k=slots, rtol=rtol)
    assert isinstance(delta_OI, Tensor), "factors are refused"
    u, s, v, retries = orthogonal_svd(delta_OI)
    rank = torch.full(s.shape[:-1], s.shape[-1])
    # Copies, so that the full bases are freed before the next expert is read.
    return ThinSVD(u[..., :slots].clone(), s[..., :slots].clone(), v[..., :slots].clone(), rank, retries)


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, rows, columns = shape
    slots = _slots(shape, n_experts, options["k"], options["min_k"])
    joint = n_experts * slots
    # All experts' triplets in float64: as parts, side by side, as polar factors; then the factors in the compute dtype.
    # `svd_workspace` is for a compute dtype of float32; LAPACK's own route, in float64, takes twice that.
    routes = 1 if options["rank_aware"] else 2
    decompose = 2 * joint * (rows + columns) + routes * svd_workspace(rows, columns)
    orthogonalize = 7 * joint * (rows + columns) + 12 * joint * joint + rows * columns
    return math.prod(batch) * max(decompose, orthogonalize)


TSV = MergeMethod(
    "tsv",
    merge,
    "matrix",
    laws=frozenset({"permutation", "single", "homogeneous", "odd", "left_orthogonal", "right_orthogonal", "zeros"}),
    lowrank=in_cores(merge, refused=("rank_aware", False, _NEEDS_NULL_SPACE), factored=True),
    access=Access(one_pass=True),
    cost=MethodCost(workspace=_workspace, products=lambda options: (4, 10)),
    elsewhere=lambda options, n_experts: "share",  # the authors' mean; the weights are factors in the method
)
