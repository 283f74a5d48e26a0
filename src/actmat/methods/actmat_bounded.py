"""ACTMat's direction at the size of the average: a ridge of one mean eigenvalue, and a bound on the norm.

ACTMat lengthens the merged delta with the number of experts, up to several times the experts' own norm; and where the
estimates `D_t^T D_t` say little about the inputs, as for LoRA, it does so in meaningless directions. Here the average
fills the directions that the ridge fades out, and the result is never longer than the average: the estimate may rotate
the merged delta, but not stretch it. Found in this project's study of variants (docs/experiments).
"""

from __future__ import annotations

from typing import Annotated

from actmat.linalg.interference.rule import Filter, Rule
from actmat.methods._shared.interference import SHARED_LAWS, SolverOption, member
from actmat.methods.contract import Bounds

__all__ = ["ACTMAT_BOUNDED", "rule"]


def rule(*, ridge: Annotated[float, Bounds(0, open_low=True)] = 1.0, solver: SolverOption = "auto") -> Rule:
    """`X = N + (B - N S) (S + rho I)^-1`, `D* = X min(1, ||N||_F / ||X||_F)`, `rho = ridge * tr(S) / I`.

    `S = sum_t w_t D_t^T D_t`, `B = sum_t w_t D_t D_t^T D_t`, `N = sum_t w_t D_t / sum_t w_t`. Weights are non-negative.

    Args:
        ridge: relative ridge, in units of the mean eigenvalue of `S`; the larger, the nearer to the average.
    """
    return Rule(spectral=Filter("tikhonov", ridge=ridge), null="mean", solver=solver, bounded=True)


ACTMAT_BOUNDED = member(
    rule,
    name="actmat_bounded",
    summary="ACTMat with a ridge, filled with the average and never longer than it: for adapters, too.",
    equation="X = N + (B - N S) (S + ridge tr(S)/I)^-1, D* = X min(1, |N|/|X|), N the average",
    reference="this project's study of variants of ACTMat (Model Merging via Data-Free Covariance Estimation)",
    laws=SHARED_LAWS | {"single", "identical", "left_orthogonal", "right_orthogonal"},
    flops="(2T + 4) N^3",
    preset_of="actmat",
    meets_every_expert=True,
)
