"""ACTMat with a relative ridge in place of the hard cut-off: no eigendecomposition, and shrinkage of weak directions.

The hard cut-off of ACTMat keeps every direction above it at full strength, however poorly the deltas determine it;
the ridge fades weak directions out. Its size is relative to the mean eigenvalue of `S`: the scale of the spectrum
depends on the fine-tuning runs, so an absolute ridge would have no meaning.
"""

from __future__ import annotations

from typing import Annotated

from actmat.linalg.interference.rule import Filter, Rule
from actmat.methods._shared.interference import SHARED_LAWS, FillOption, SolverOption, member
from actmat.methods.contract import Bounds

__all__ = ["ACTMAT_RIDGE", "rule"]


def rule(
    *, ridge: Annotated[float, Bounds(0, open_low=True)] = 0.1, null: FillOption = "zero", solver: SolverOption = "auto"
) -> Rule:
    """`D* = N + (B - N S) (S + rho I)^-1`, `rho = ridge * tr(S) / I`.

    `S = sum_t w_t D_t^T D_t`, `B = sum_t w_t D_t D_t^T D_t`, `N` the fill. Weights are non-negative.

    Args:
        ridge: relative ridge, in units of the mean eigenvalue of `S`.
    """
    return Rule(spectral=Filter("tikhonov", ridge=ridge), null=null, solver=solver)


ACTMAT_RIDGE = member(
    rule,
    name="actmat_ridge",
    summary="ACTMat with weak directions faded out by a ridge relative to the mean eigenvalue.",
    equation="D* = (sum_t D_t D_t^T D_t) (sum_t D_t^T D_t + ridge tr(S)/I)^-1",
    reference="Tikhonov filter of ACTMat (Model Merging via Data-Free Covariance Estimation)",
    laws=SHARED_LAWS | {"left_orthogonal", "right_orthogonal", "zero_expert"},
    flops="(2T + 2) N^3",
    preset_of="actmat",
    meets_every_expert=True,
)
