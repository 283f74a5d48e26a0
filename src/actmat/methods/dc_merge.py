"""Method `dc_merge`.

Shapes: `T` experts, `O` out_features, `I` in_features, `K` directions kept per expert, `J = T K` of all, `P, Q` ranks
of the common bases of low-rank deltas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from actmat.linalg.singular import join_parts, slots_per_expert, trim_parts
from actmat.linalg.singular import polar_factor as polar
from actmat.linalg.svd import RANK_RTOL, MatrixForm, accuracy_of, svd_workspace, thin_svd
from actmat.methods._shared.per_matrix import KnownShape, OneMatrix, each_matrix, in_cores
from actmat.methods.contract import Bounds, Fraction, MergeMethod
from actmat.methods.facets import LINEAR_LAWS, Merged, MethodCost

Smoothing = Literal["none", "mean", "linear"]


def merge(
    deltas: Sequence[MatrixForm],
    shape: KnownShape = None,
    *,
    density: Fraction = 1e-3,
    k: Annotated[int | None, Bounds(low=0)] = None,
    smoothing: Smoothing = "none",
    rho: Annotated[float, Bounds(low=1)] = 5.0,
    rtol: Fraction = RANK_RTOL,
) -> Merged:
    """Sparse cores in one basis of all leading directions, merged by sign, a block per expert.

        D* = U (ties(M_1, .., M_T) o blocks) V^T,   M_t = top(U^T D_t^(K) V)
        U = polar([U_1 .. U_T]),   V = polar([V_1 .. V_T])

    `D_t^(K)` has the top `K = floor(min(O, I) / T)` triplets `U_t`, `s_t`, `V_t` of `D_t`; `top` keeps the largest
    entries of a core; `ties` is the mean of those that have the sign of the sum. Block `t` of the block-diagonal mask
    belongs to the directions of expert `t`.

    The public code is two programs: one for full fine-tuning, which does not smooth the singular values, and one for
    LoRA, which does, with 16 directions of each expert. `k` and `smoothing` choose between them. Directions beyond an
    expert's numerical rank are left out; the code takes LAPACK's null-space vectors there.

    Args:
        density: share of a core's entries that is kept, at least one; of `min(O, I)^2` entries, or of `(T k)^2`
            if `k` is given.
        k: directions of each expert, instead of `floor(min(O, I) / T)`; 16 in the LoRA code.
        smoothing: of an expert's kept singular values, with their sum: "none"; "mean", all equal; "linear", falling
            evenly from `min(rho, s_1 / s_K)` times the last to the last.
        rho: see `smoothing`.
        rtol: singular values, and entries of a core, at or below `rtol` times the expert's largest count as zero.

    Source:
        "DC-Merge", CVPR 2026 (public code: Tobeginwith/DC-Merge).
    """
    slots, entries = _sizes(shape or deltas[0].shape, len(deltas), k, density)
    rule = partial(_merge, slots=slots, entries=entries, smoothing=smoothing, rho=rho, rtol=rtol)
    value, stats = each_matrix(rule, deltas)
    return Merged(value.to(deltas[0].dtype), stats | {"k": slots})


def smooth(s_K: Tensor, smoothing: Smoothing, rho: float) -> Tensor:
    """Singular values of the same sum, flatter; zeros at the end stay zero.

    >>> smooth(torch.tensor([8.0, 1.0, 0.0]), "linear", 5.0).tolist()
    [7.5, 1.5, 0.0]
    """
    rank = int((s_K > 0).sum())
    if smoothing == "none" or rank == 0:
        return s_K
    top = 1.0 if smoothing == "mean" else min(rho, float(s_K[0] / s_K[rank - 1]))
    shares = torch.linspace(top, 1.0, rank, dtype=s_K.dtype, device=s_K.device)
    out_K = torch.zeros_like(s_K)
    out_K[:rank] = s_K.sum() * shares / shares.sum()
    return out_K


def _sizes(shape: Sequence[int], n_experts: int, k: int | None, density: float) -> tuple[int, int]:
    """Directions per expert, and entries of a core that are kept."""
    short = min(shape[-2:])
    slots = min(slots_per_expert(shape, n_experts) if k is None else k, short)
    side = short if k is None else n_experts * k
    return slots, max(1, int(density * side * side))


def _merge(
    deltas: Sequence[MatrixForm], *, slots: int, entries: int, smoothing: Smoothing, rho: float, rtol: float
) -> OneMatrix:
    """One matrix, in float64; `deltas` may be small cores."""
    accuracy = accuracy_of(deltas[0])
    if slots == 0:
        return OneMatrix(torch.zeros(deltas[0].shape, dtype=torch.float64), {"entries_kept": 0})
    count = len(deltas)
    parts = trim_parts([thin_svd(delta, k=slots, rtol=rtol) for delta in deltas])
    u_OJ, _, v_IJ = join_parts(parts)
    left, right = polar(u_OJ, accuracy=accuracy), polar(v_IJ, accuracy=accuracy)
    size = parts[0].s_K.shape[-1]  # fewer than the slots where no expert has so many directions
    blocks, entries_kept = [], 0
    for part in parts:
        rows_JK = (left.factor_MN.mT @ part.u_OK) * smooth(part.s_K, smoothing, rho)
        core_JJ = _top(rows_JK @ (right.factor_MN.mT @ part.v_IK).mT, entries, rtol)
        entries_kept += int(core_JJ.count_nonzero())
        blocks.append(core_JJ.view(count, size, count, size).diagonal(dim1=0, dim2=2).clone())
    merged_KKT = _agreeing_mean(torch.stack(blocks))
    left_TOK = left.factor_MN.view(-1, count, size).transpose(0, 1)
    scaled_OJ = (left_TOK @ merged_KKT.permute(2, 0, 1)).transpose(0, 1).reshape(-1, count * size)
    retries = left.retries + right.retries + tuple(name for part in parts for name in part.retries)
    return OneMatrix(scaled_OJ @ right.factor_MN.mT, {"entries_kept": entries_kept}, retries)


def _top(core_JJ: Tensor, entries: int, rtol: float) -> Tensor:
    """The entries whose magnitude reaches that of the `entries`-th, except those within rounding error of the largest.

    Rounding errors have a sign and would count as votes: disjoint experts would halve one another.
    """
    size_JJ = core_JJ.abs()
    top = size_JJ.flatten().topk(min(entries, size_JJ.numel())).values
    return core_JJ * ((size_JJ >= top[-1]) & (size_JJ > rtol * top[0]))


def _agreeing_mean(votes: Tensor) -> Tensor:
    """Mean, entry by entry over the first axis, of the votes with the sign of the sum; 0 if the sum is 0."""
    sign = votes.sum(0).sign()
    agreeing = (votes.sign() == sign) & (sign != 0)
    return (votes * agreeing).sum(0) / agreeing.sum(0).clamp_min(1)


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, rows, columns = shape
    slots, _ = _sizes(shape, n_experts, options["k"], options["density"])
    joint = n_experts * slots
    # In float64, two elements each: all triplets as parts, side by side and as polar factors; a core with its
    # magnitudes; the blocks of all experts.
    decompose = 2 * joint * (rows + columns) + svd_workspace(rows, columns)
    factors = 7 * joint * (rows + columns) + 12 * joint * joint
    cores = 8 * joint * (rows + columns) + 12 * joint * joint + rows * columns
    return max(decompose, factors, cores) + 3 * math.prod(batch) * rows * columns


DC_MERGE = MergeMethod(
    "dc_merge",
    merge,
    "matrix",
    laws=LINEAR_LAWS,
    lowrank=in_cores(merge, factored=True),
    cost=MethodCost(workspace=_workspace, products=lambda options: (4, 12)),
    note="a single expert is not returned unchanged: 'density' of min(O, I)^2 entries is fewer than its singular "
    "values in small layers ('entries_kept' in the records)",
)
