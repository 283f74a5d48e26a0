"""CtM (compress, then merge): one pair of subspaces of rank `R` for all experts, and a merge of coordinates in them.

Z. He, R. Ding, Z. Huang, R. Yang, T. Li, X. Huang, "Compress then Merge: From Multiple LoRAs into One Low-Rank
Adapter", ICML 2026, arXiv:2606.03723. Written from the paper's equations; there are no golden results of its authors'
code here.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` directions of each subspace, `P, Q` ranks of the common
bases of low-rank deltas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from actmat.linalg import operations as ops
from actmat.linalg.lapack import Retries
from actmat.linalg.lowrank import LowRank, common_bases
from actmat.linalg.masks.election import election_workspace
from actmat.linalg.masks.threshold import selection_workspace
from actmat.linalg.svd import Way, accuracy_of, svd_workspace, thin_svd
from actmat.methods import ties
from actmat.methods._shared.per_matrix import OneMatrix, each_matrix
from actmat.methods.contract import Bounds, Fraction, MergeMethod
from actmat.methods.facets import LINEAR_LAWS, About, Cost, LowRankForm, Merged, MergedLowRank

InnerRule = Literal["ties", "sum", "average"]
Directions = Annotated[int, Bounds(low=1)]
Sweeps = Annotated[int, Bounds(low=0)]

ROUNDING = 2.0**-40
"""Coordinates at or below this share of an expert's largest are rounding, which has a sign and would vote."""


def merge(
    deltas: Sequence[Tensor],
    *,
    rank: Directions = 16,
    balance: Fraction = 0.25,
    rule: InnerRule = "ties",
    density: Fraction = 0.25,
    sweeps: Sweeps = 25,
) -> Merged:
    """`D* = U rule(U^T D_1 V, .., U^T D_T V) V^T`, of rank at most `R` by construction.

    `U` (`O x R`) and `V` (`I x R`) maximise `sum_t ||U^T X_t V||^2` (Tucker-2), `X_t = l_t D_t / ||D_t||` with
    `l_t = balance ||D_t|| + (1 - balance) mean_u ||D_u||`.

    Args:
        rank: `R`.
        balance: 1 lets an expert's norm decide its say in the subspaces, 0 gives all the same.
        rule: for the coordinates: TIES (mean of the trimmed entries that agree in sign), their sum, or their average.
        density: fraction of the coordinates that `ties` keeps.
        sweeps: alternating refinements (HOOI) of the leading singular subspaces (HOSVD) from which they start.
    """
    slots = min(rank, *deltas[0].shape[-2:])
    rule_of = partial(_merge, slots=slots, balance=balance, rule=rule, density=density, sweeps=sweeps)

    def dense(each: Sequence[Tensor]) -> OneMatrix:
        left_OR, right_RI, retries, ways = rule_of(each)
        return OneMatrix(left_OR @ right_RI, {"rank_max": _rank(right_RI)}, retries, ways)

    value, stats = each_matrix(dense, deltas)
    return Merged(value.to(deltas[0].dtype), stats)


def merge_lowrank(
    deltas: Sequence[LowRank],
    *,
    rank: Directions = 16,
    balance: Fraction = 0.25,
    rule: InnerRule = "ties",
    density: Fraction = 0.25,
    sweeps: Sweeps = 25,
) -> MergedLowRank:
    """The same merge on the cores of the common bases; its factors have `R` columns at most. Exact, in float64."""
    slots = min(rank, *deltas[0].shape[-2:])
    rule_of = partial(_merge, slots=slots, balance=balance, rule=rule, density=density, sweeps=sweeps)
    bases = common_bases([d.to(torch.float64) for d in deltas])
    lefts: list[Tensor] = []
    rights: list[Tensor] = []

    def factored(each: Sequence[Tensor]) -> OneMatrix:
        left_PR, right_RQ, retries, ways = rule_of(each)
        lefts.append(left_PR)
        rights.append(right_RQ)
        return OneMatrix(left_PR[:0], {"rank_max": _rank(right_RQ)}, retries, ways)

    _, stats = each_matrix(factored, bases.cores_PQ)
    batch = bases.p_OP.shape[:-2]
    left_PR, right_RQ = (torch.stack(side).reshape(*batch, *side[0].shape) for side in (lefts, rights))
    value = LowRank(bases.p_OP @ left_PR, right_RQ @ bases.q_IQ.mT)
    return MergedLowRank(value.to(deltas[0].b_OR.dtype), stats)


def shared_subspaces(
    targets: Sequence[Tensor], rank: int, sweeps: int, accuracy: torch.dtype
) -> tuple[Tensor, Tensor, Retries, Sequence[Way]]:
    """`U` (`O x R`), `V` (`I x R`) of large `sum_t ||U^T X_t V||^2`, and how; zero columns beyond the rank.

    Every sweep takes the leading left singular vectors of `[X_1 V .. X_T V]`, then those of `[X_1^T U .. X_T^T U]`.
    """
    left = thin_svd(torch.cat(list(targets), dim=-1), k=rank, accuracy=accuracy)
    right = thin_svd(torch.cat([x.mT for x in targets], dim=-1), k=rank, accuracy=accuracy)
    left_OR, right_IR, retries, ways = left.u_OK, right.u_OK, left.retries + right.retries, (left.way, right.way)
    for _ in range(sweeps):
        left = thin_svd(torch.cat([x.double() @ right_IR for x in targets], dim=-1), k=rank, accuracy=torch.float64)
        left_OR = left.u_OK
        right = thin_svd(torch.cat([x.mT.double() @ left_OR for x in targets], dim=-1), k=rank, accuracy=torch.float64)
        right_IR, retries = right.u_OK, retries + left.retries + right.retries
    return left_OR, right_IR, retries, ways


def _merge(
    deltas: Sequence[Tensor],
    *,
    slots: int,
    balance: float,
    rule: InnerRule,
    density: float,
    sweeps: int,
) -> tuple[Tensor, Tensor, Retries, Sequence[Way]]:
    """The factors `U rule(..)` and `V^T` of one matrix, in float64; `deltas` may be small cores."""
    norms = [float(torch.linalg.vector_norm(delta, dtype=torch.float64)) for delta in deltas]
    mean = math.fsum(norms) / len(norms)
    shares = [(balance * norm + (1 - balance) * mean) / norm if norm > 0 else 0.0 for norm in norms]
    targets = [delta * share for delta, share in zip(deltas, shares, strict=True)]
    left_OR, right_IR, retries, ways = shared_subspaces(targets, slots, sweeps, accuracy_of(deltas[0]))
    parts = [_without_rounding(left_OR.mT @ delta.double() @ right_IR) for delta in deltas]
    if rule == "ties":
        rows, columns = parts[0].shape  # fewer than the slots where the deltas are small cores
        padded = [torch.nn.functional.pad(part, (0, slots - columns, 0, slots - rows)) for part in parts]
        merged_RR = ties.merge(padded, density=density).value[:rows, :columns]
    else:
        merged_RR = torch.stack(parts).sum(0) / (len(parts) if rule == "average" else 1)
    return left_OR @ merged_RR, right_IR.mT, retries, ways


def _without_rounding(part_RR: Tensor) -> Tensor:
    size_RR = part_RR.abs()
    return part_RR * (size_RR > ROUNDING * size_RR.max())


def _rank(right_RI: Tensor) -> int:
    return int((right_RI.square().sum(1) > 0).sum())


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    *batch, rows, columns = shape
    rank = min(options["rank"], rows, columns)
    # The targets, all of them side by side; then in float64, two elements each: a target and its products.
    begin = 2 * n_experts * rows * columns + max(
        svd_workspace(rows, n_experts * columns), svd_workspace(columns, n_experts * rows)
    )
    sweep = n_experts * rows * columns + 4 * rows * columns + 8 * n_experts * rank * (rows + columns)
    sweep += 2 * svd_workspace(max(rows, columns), n_experts * rank)
    scratch = 0
    if options["rule"] == "ties":
        scratch = selection_workspace(rank * rank) + election_workspace(rank * rank, n_experts)
    whole: int = max(begin, sweep) + scratch + 3 * math.prod(batch) * rows * columns
    return whole


def _operations(shape: Sequence[int], n_experts: int, options: Mapping[str, Any], double: bool) -> list[ops.Operation]:
    *batch, rows, columns = shape
    rank, count = min(options["rank"], rows, columns), n_experts
    found = ops.thin_svd(rows, count * columns, rank, double=double)
    found += ops.thin_svd(columns, count * rows, rank, double=double)
    sweep = ops.repeated([ops.product(rows, rank, columns)], 2 * count)
    for side in (rows, columns):
        sweep += ops.thin_svd(side, count * rank, rank, double=True)
    found += ops.repeated(sweep, options["sweeps"])
    found += ops.repeated([ops.product(rows, rank, columns), ops.entries(2 * rows * columns)], count)
    return ops.repeated([*found, ops.product(rows, columns, rank)], math.prod(batch))


CTM = MergeMethod(
    "ctm",
    merge,
    "matrix",
    About(
        "Coordinates of all experts in one pair of subspaces of fixed rank, merged there: a low-rank result.",
        "D* = U rule(U^T D_1 V, .., U^T D_T V) V^T, U, V: Tucker-2 subspaces of the rescaled deltas",
        "He et al., Compress then Merge, ICML 2026, arXiv:2606.03723",
    ),
    laws=LINEAR_LAWS,
    lowrank=LowRankForm(merge_lowrank),
    cost=Cost("T N^3", workspace=_workspace, operations=_operations),
)
