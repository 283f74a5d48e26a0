"""Method `cat`.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` removed directions per task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from actmat.linalg.lapack import Retries, economy_svd, eigh, retry_stats
from actmat.linalg.scaling import exponent_of, largest_entry, scaled
from actmat.methods.contract import Bounds, MergeMethod
from actmat.methods.facets import Merged, MethodCost

_POSITIVE = 1e-5
"""Eigenvalues below this share of the largest magnitude are rounding (float32): their eigenvectors are arbitrary."""

_APART = 1e-3
"""Sine of the angle above which directions of two tasks count as different ones."""


def merge(
    deltas: Sequence[Tensor],
    *,
    statistics: Mapping[str, Sequence[Tensor]],
    rank: Annotated[int, Bounds(0)] = 2,
    tradeoff: Annotated[float, Bounds(0)] = 1.0,
) -> Merged:
    """Sum of the deltas, each without the output directions in which it disturbs the other tasks' inputs.

        D* = sum_i (I - P_i) D_i,
        B_k = top eigenvectors of sum_{i != k} D_i (G_k - tradeoff G_i) D_i^T

    `B_k` holds the `rank` leading eigenvectors (with a positive eigenvalue) of the effect of the other deltas on the
    inputs of task k, less the effect on their own. `P_i` projects on the span of all `B_k`, `k != i`, at once, so that
    the order of the experts does not matter (composing the projections one by one agrees where the bases are
    orthogonal, as for `T = 2`). Linear weights only; the paper's masks for norms and biases are another method.

    Args:
        rank: directions removed per task.
        tradeoff: weight of a task's own knowledge against the conflict; larger removes less.

    Source:
        W. Sun, Q. Li, Y. Geng, B. Li, "CAT Merging: a training-free approach for resolving conflicts in model merging",
        ICML 2025, arXiv:2505.06977.
    """
    grams = statistics["gram"]
    bases, retries = [], Retries()
    # the directions do not depend on the size of the deltas, but float32 may not hold their squares
    exponent = exponent_of(largest_entry(deltas))
    for k in range(len(deltas)):
        basis, new = removal_basis(deltas, grams, k, rank, tradeoff, exponent=exponent)
        bases.append(basis)
        retries += new
    out = torch.zeros_like(deltas[0], memory_format=torch.contiguous_format)
    for i, delta_OI in enumerate(deltas):
        out.add_(delta_OI)
        others = [b for k, b in enumerate(bases) if k != i]
        if not others or rank == 0:
            continue
        # The cut drops the zero columns of bases with fewer directions, and directions that two bases share.
        joint_OR = torch.cat(others, dim=-1)
        u_OR, s_R, _, new = economy_svd(joint_OR)
        retries += new
        u_OR = u_OR * (s_R > _APART).to(u_OR.dtype).unsqueeze(-2)
        out.sub_(u_OR @ (u_OR.mT @ delta_OI))
    removed = sum(int((b.norm(dim=-2) > 0.5).sum()) for b in bases)
    return Merged(out, {"directions_removed": removed, **retry_stats(retries)})


def removal_basis(
    deltas: Sequence[Tensor], grams: Sequence[Tensor], task: int, rank: int, tradeoff: float, *, exponent: int = 0
) -> tuple[Tensor, Retries]:
    """`B_k`, `*batch O R`, and retries: orthonormal columns, zero ones in place of directions without conflict.

    The deltas are taken times `2^-exponent`, one at a time.
    """
    n_out = deltas[0].shape[-2]
    conflict_OO = deltas[0].new_zeros((*deltas[0].shape[:-1], n_out))
    for i, delta_OI in enumerate(deltas):
        if i != task:
            near_OI = scaled(delta_OI, -exponent)
            conflict_OO += near_OI @ (grams[task] - tradeoff * grams[i]) @ near_OI.mT
    values, vectors_OO, retries = eigh((conflict_OO + conflict_OO.mT) / 2)
    keep = min(rank, n_out)
    top_R = values[..., n_out - keep :]
    scale = values.abs().amax(dim=-1, keepdim=True)
    conflicting_R: Tensor = top_R > _POSITIVE * scale
    basis_OR: Tensor = vectors_OO[..., n_out - keep :] * conflicting_R.to(values.dtype).unsqueeze(-2)
    return basis_OR, retries


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, n_out, n_in = shape
    rank = min(int(options.get("rank", 2)), n_out)
    of_one = 3 * n_out * n_in + n_in * n_in + 6 * n_out * n_out + 3 * n_experts * rank * n_out
    # 3 O I: result, product, a delta brought near 1; 6 O^2: the conflict, its symmetric part, eigenvectors and
    # LAPACK's work space
    return math.prod(batch) * of_one


CAT = MergeMethod(
    "cat",
    merge,
    "matrix",
    laws=frozenset({"single", "homogeneous", "odd", "left_orthogonal", "right_orthogonal", "zeros"}),
    cost=MethodCost(workspace=_workspace, products=lambda options: (11, 0)),
    needs_statistics=("gram",),
)
