"""ACTMat with a relative ridge in place of the hard cut-off: no eigendecomposition, and shrinkage of weak directions.

The hard cut-off of ACTMat keeps every direction above it at full strength, however poorly the deltas determine it;
the ridge fades weak directions out. Its size is relative to the mean eigenvalue of `S`: the scale of the spectrum is
that of the fine-tuning runs, so an absolute ridge would mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from actmat.linalg.filters import Filter
from actmat.linalg.interference import Null, Rule, Solver
from actmat.linalg.lowrank import LowRank
from actmat.methods._shared.interference import merge_rule, merge_rule_lowrank, stages_of, workspace_of
from actmat.methods.contract import Bounds, Merged, MergedLowRank, MergeMethod

__all__ = ["ACTMAT_RIDGE", "merge", "merge_lowrank"]


def _rule(
    ridge: float = 0.1,
    null: Null = "zero",
    solver: Solver = "auto",
) -> Rule:
    return Rule(spectral=Filter("tikhonov", ridge=ridge), null=null, solver=solver)


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    ridge: Annotated[float, Bounds(0, open_low=True)] = 0.1,
    null: Null = "zero",
    solver: Solver = "auto",
) -> Merged:
    """`D* = N + (B - N S) (S + rho I)^-1`, `rho = ridge * tr(S) / I`.

    `S = sum_t w_t D_t^T D_t`, `B = sum_t w_t D_t D_t^T D_t`, `N` the fill.

    Args:
        weights: non-negative, one per expert; they multiply `K_t`.
        ridge: relative ridge, in units of the mean eigenvalue of `S`.
        null: what fills the filtered-out directions: nothing, the sum, or the mean of the deltas.
        solver: which exact form to use, see `actmat`.

    Raises:
        NumericalError: NaN or infinity in a delta.
        ValueError: a negative weight.
    """
    return merge_rule(deltas, _rule(ridge, null, solver), weights)


def merge_lowrank(
    deltas: Sequence[LowRank],
    *,
    weights: Sequence[float] | None = None,
    ridge: float = 0.1,
    null: Null = "zero",
    solver: Solver = "auto",
) -> MergedLowRank:
    """`merge` on factored deltas, exact, of rank at most `sum_t R_t`; options as there."""
    return merge_rule_lowrank(deltas, _rule(ridge, null, solver), weights)


ACTMAT_RIDGE = MergeMethod(
    name="actmat_ridge",
    merge=merge,
    acts_on="matrix",
    summary="ACTMat with weak directions faded out by a ridge relative to the mean eigenvalue.",
    equation="D* = (sum_t D_t D_t^T D_t) (sum_t D_t^T D_t + ridge tr(S)/I)^-1",
    reference="Tikhonov filter of ACTMat (Model Merging via Data-Free Covariance Estimation)",
    laws=frozenset(
        {
            "permutation",
            "homogeneous",
            "odd",
            "left_orthogonal",
            "right_orthogonal",
            "zero_expert",
            "zeros",
        }
    ),
    merge_lowrank=merge_lowrank,
    one_pass=True,
    workspace=workspace_of(_rule),
    flops="(2T + 2) N^3",
    preset_of="actmat",
    stages=stages_of(_rule),
)
