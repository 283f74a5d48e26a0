"""ACE's centring: ACTMat whose covariance estimates leave out the mean row of each delta.

The estimate is a covariance over the `O` rows of a delta rather than an uncentred second moment. Only this part of
ACE is provided; its adaptive parts are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from actmat.linalg.estimators import Estimator
from actmat.linalg.filters import Filter
from actmat.linalg.interference import Null, Rule, Solver
from actmat.linalg.lowrank import LowRank
from actmat.methods._shared.interference import merge_rule, merge_rule_lowrank, stages_of, workspace_of
from actmat.methods.contract import Bounds, Merged, MergedLowRank, MergeMethod

__all__ = ["ACE", "merge", "merge_lowrank"]


def _rule(
    rtol: float | None = None,
    null: Null = "zero",
    solver: Solver = "auto",
) -> Rule:
    return Rule(Estimator(centre=True), Filter(rtol=rtol), null, solver)


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    rtol: Annotated[float | None, Bounds(0, 1)] = None,
    null: Null = "zero",
    solver: Solver = "auto",
) -> Merged:
    """`D* = (sum_t w_t D_t K_t) (sum_t w_t K_t)^+`, `K_t = A_t^T A_t`, `A_t = D_t - 1 mean_O(D_t)^T`.

    Args:
        weights: non-negative, one per expert; they multiply `K_t`.
        rtol: relative cut-off in units of the eigenvalues of `S`; default `I * eps(float32)`, in float64 too.
        null: what fills the filtered-out directions: nothing, the sum, or the mean of the deltas.
        solver: which exact form to use, see `actmat`.

    Raises:
        NumericalError: NaN or infinity in a delta.
        ValueError: a negative weight.
    """
    return merge_rule(deltas, _rule(rtol, null, solver), weights)


def merge_lowrank(
    deltas: Sequence[LowRank],
    *,
    weights: Sequence[float] | None = None,
    rtol: float | None = None,
    null: Null = "zero",
    solver: Solver = "auto",
) -> MergedLowRank:
    """`merge` on factored deltas, exact, of rank at most `sum_t R_t`; options as there."""
    return merge_rule_lowrank(deltas, _rule(rtol, null, solver), weights)


ACE = MergeMethod(
    name="ace",
    merge=merge,
    acts_on="matrix",
    summary="ACTMat with the mean row taken out of each delta before its covariance is estimated.",
    equation="D* = (sum_t D_t K_t) (sum_t K_t)^+, K_t = (D_t - mean)^T (D_t - mean)",
    reference="ACE-Merging: Data-Free Model Merging with Adaptive Covariance Estimation (centring only)",
    laws=frozenset(
        {
            "permutation",
            "homogeneous",
            "odd",
            "right_orthogonal",
            "zero_expert",
            "zeros",
        }
    ),
    merge_lowrank=merge_lowrank,
    one_pass=True,
    workspace=workspace_of(_rule),
    flops="(2T + 3) N^3",
    preset_of="actmat",
    stages=stages_of(_rule),
)
