"""ACTMat's direction at the size of the average: a ridge of one mean eigenvalue, and a bound on the norm.

ACTMat's rule lengthens the merged delta, the more the more experts there are, up to several times the experts' own
norm; and where the estimates `D_t^T D_t` know little of the inputs, as for LoRA, it does so in directions that mean
nothing. Here what the ridge fades out is filled with the average, and the result is never longer than the average: the
estimate may turn the merged delta, not stretch it. Found in this project's study of variants (docs/experiments).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from actmat.linalg.filters import Filter
from actmat.linalg.interference import Rule, Solver
from actmat.linalg.lowrank import LowRank
from actmat.methods._shared.interference import merge_rule, merge_rule_lowrank, stages_of, workspace_of
from actmat.methods.contract import Bounds, Merged, MergedLowRank, MergeMethod

__all__ = ["ACTMAT_BOUNDED", "merge", "merge_lowrank"]


def _rule(
    ridge: float = 1.0,
    solver: Solver = "auto",
) -> Rule:
    return Rule(spectral=Filter("tikhonov", ridge=ridge), null="mean", solver=solver, bounded=True)


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    ridge: Annotated[float, Bounds(0, open_low=True)] = 1.0,
    solver: Solver = "auto",
) -> Merged:
    """`X = N + (B - N S) (S + rho I)^-1`, `D* = X min(1, ||N||_F / ||X||_F)`, `rho = ridge * tr(S) / I`.

    `S = sum_t w_t D_t^T D_t`, `B = sum_t w_t D_t D_t^T D_t`, `N = sum_t w_t D_t / sum_t w_t`.

    Args:
        weights: non-negative, one per expert; they multiply `K_t`, and the deltas in the average.
        ridge: relative ridge, in units of the mean eigenvalue of `S`; the larger, the nearer to the average.
        solver: which exact form to use, see `actmat`.

    Raises:
        NumericalError: NaN or infinity in a delta.
        ValueError: a negative weight, or weights that sum to zero.
    """
    return merge_rule(deltas, _rule(ridge, solver), weights)


def merge_lowrank(
    deltas: Sequence[LowRank],
    *,
    weights: Sequence[float] | None = None,
    ridge: float = 1.0,
    solver: Solver = "auto",
) -> MergedLowRank:
    """`merge` on factored deltas, exact, of rank at most `sum_t R_t`; options as there."""
    return merge_rule_lowrank(deltas, _rule(ridge, solver), weights)


ACTMAT_BOUNDED = MergeMethod(
    name="actmat_bounded",
    merge=merge,
    acts_on="matrix",
    summary="ACTMat with a ridge, filled with the average and never longer than it: for adapters, too.",
    equation="X = N + (B - N S) (S + ridge tr(S)/I)^-1, D* = X min(1, |N|/|X|), N the average",
    reference="this project's study of variants of ACTMat (Model Merging via Data-Free Covariance Estimation)",
    laws=frozenset(
        {
            "permutation",
            "single",
            "identical",
            "homogeneous",
            "odd",
            "left_orthogonal",
            "right_orthogonal",
            "zeros",
        }
    ),
    merge_lowrank=merge_lowrank,
    one_pass=True,
    workspace=workspace_of(_rule),
    flops="(2T + 4) N^3",
    preset_of="actmat",
    stages=stages_of(_rule),
)
