"""ESM: essential subspaces, the output directions in which a delta moves what its own inputs give.

L. Li, L. Qi, X. Geng, "Model Merging in the Essential Subspace", CVPR 2026, arXiv:2602.20208, and its extension
arXiv:2606.19164. The scaling between layers is the step `esm` of post-processing (`--post esm`).
Shapes: `T` experts, `O` out_features, `I` in_features, `K` directions kept per expert, `J` of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from actmat.linalg import operations as ops
from actmat.linalg.lapack import Retries, eigh
from actmat.linalg.singular import polar_factor, slots_per_expert
from actmat.linalg.svd import RANK_RTOL, svd_workspace
from actmat.methods._shared.per_matrix import OneMatrix, each_matrix
from actmat.methods.contract import Bounds, MergeMethod
from actmat.methods.facets import About, Cost, Merged


def merge(
    deltas: Sequence[Tensor],
    *,
    statistics: Mapping[str, Sequence[Tensor]],
    power: Annotated[float, Bounds(0)] = 2.0,
    spread: Annotated[float, Bounds(0)] = 0.15,
    factor: float = 2.0,
) -> Merged:
    """`D* = factor mean(s_U) mean(s_V) polar([U_1 .. U_T]) polar([V_1; ..; V_T])`, scaled before.

    `U_t` holds the `K = floor(min(O, I) / T)` leading eigenvectors of `D_t G_t D_t^T`, the second moment of the outputs
    that the delta adds on its own inputs, with eigenvalues `l_t`; `V_t = U_t^T D_t`. Then

        V_t <- V_t (||D_t|| / mean_s ||D_s||)^power             between experts
        u_tk, v_tk <- e_tk u_tk, e_tk v_tk,                     between directions
            e_t = (l_t / mean l_t)^spread, divided by its mean
        column j of [V_1; ..] <- (n_j / mean n)^power of it     between inputs, n_j the norm of the column

    and the singular values `s_U`, `s_V` of both stacks become their means. Directions beyond the numerical rank of
    `D_t G_t D_t^T` are left out; the authors' code fills them up. float64 inside.

    Args:
        power: of the ratios of norms; 2 in the authors' code, 0 leaves both scalings out.
        spread: of the ratios of eigenvalues; 0.15 in the authors' code, 0 in the first version of the paper.
        factor: of the result; 2 in the authors' code, before a factor chosen by validation.
    """
    shape = deltas[0].shape
    grams = [g.expand(*shape[:-2], *g.shape[-2:]) for g in statistics["gram"]]

    def rule(given: Sequence[Tensor]) -> OneMatrix:
        return _merge_one(given[: len(deltas)], given[len(deltas) :], power, spread, factor)

    value, stats = each_matrix(rule, [*deltas, *grams])
    return Merged(value.to(deltas[0].dtype), stats)


def _merge_one(
    deltas: Sequence[Tensor], grams: Sequence[Tensor], power: float, spread: float, factor: float
) -> OneMatrix:
    slots, retries = slots_per_expert(deltas[0].shape, len(deltas)), Retries()
    norms = [float(torch.linalg.norm(d.to(torch.float64))) for d in deltas]
    mean = sum(norms) / len(norms)
    left, right = [], []
    for delta_OI, gram_II, norm in zip(deltas, grams, norms, strict=True):
        wide_OI = delta_OI.to(torch.float64)
        values, vectors_OO, new = eigh(_symmetric(wide_OI @ gram_II.to(torch.float64) @ wide_OI.mT))
        retries += new
        kept = min(slots, int((values > RANK_RTOL * values[-1:]).sum()))
        if kept == 0:
            continue
        top_K = values[-kept:].flip(0)
        u_OK = vectors_OO[:, -kept:].flip(1)
        scale_K = (top_K / top_K.mean()) ** spread
        scale_K = scale_K / scale_K.mean()
        left.append(u_OK * scale_K)
        right.append((u_OK.mT @ wide_OI) * scale_K[:, None] * (norm / mean) ** power)
    numbers = {"directions_min": min((u.shape[1] for u in left), default=0)}
    if not left:
        return OneMatrix(torch.zeros_like(deltas[0], dtype=torch.float64), numbers, retries)
    u_OJ, v_JI = torch.cat(left, dim=1), torch.cat(right, dim=0)
    columns_I = torch.linalg.norm(v_JI, dim=0)
    v_JI = v_JI * (columns_I / columns_I.mean()) ** power
    sides = [polar_factor(side) for side in (u_OJ, v_JI)]
    level = math.prod(float(side.s_S.mean()) for side in sides)
    value_OI = sides[0].factor_MN @ sides[1].factor_MN * (factor * level)
    return OneMatrix(value_OI, numbers, retries + sides[0].retries + sides[1].retries)


def _symmetric(square: Tensor) -> Tensor:
    return (square + square.mT) / 2


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, n_out, n_in = shape
    one = 12 * n_out * n_out + 2 * n_in * n_in + 8 * n_out * n_in + svd_workspace(n_out, n_in)
    # eigenvectors with LAPACK's work space, a Gram and a delta in float64, both stacks, and their polar factors
    return one + math.prod(batch) * n_out * n_in


def _operations(shape: Sequence[int], n_experts: int, options: Mapping[str, Any], double: bool) -> list[ops.Operation]:
    *batch, n_out, n_in = shape
    slots = max(1, slots_per_expert((n_out, n_in), n_experts))
    each = [ops.product(n_out, n_in, n_in), ops.product(n_out, n_out, n_in), ops.eigh(n_out),
            ops.product(slots, n_in, n_out)]  # fmt: skip
    joint = slots * n_experts
    polars = [op for side in (n_out, n_in) for op in ops.polar_factor(side, joint, double=True)]
    return ops.repeated([*ops.repeated(each, n_experts), *polars, ops.product(n_out, n_in, joint)], math.prod(batch))


ESM = MergeMethod(
    "esm",
    merge,
    "matrix",
    About(
        "Orthogonalised sum of the deltas in the output directions that move their own inputs most.",
        "D* = c polar([U_1 .. U_T]) polar([V_1; ..; V_T]), U_t: top eigenvectors of D_t G_t D_t^T, V_t = U_t^T D_t",
        "Li, Qi, Geng, Model Merging in the Essential Subspace, CVPR 2026, arXiv:2602.20208",
    ),
    laws=frozenset({"permutation", "odd", "left_orthogonal", "zeros", "homogeneous"}),
    cost=Cost("(5T + 4) N^3", workspace=_workspace, operations=_operations),
    needs_statistics=("gram",),
)
