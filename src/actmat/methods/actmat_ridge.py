"""ACTMat with a ridge in place of the hard cut-off.

The hard cut-off keeps weak directions at full strength, however poorly the deltas determine them; a ridge fades them
out. It is relative to the mean eigenvalue of `S`, whose scale depends on the fine-tuning runs.
"""

from __future__ import annotations

from typing import Annotated

from actmat.linalg.interference.rule import Filter, Rule
from actmat.methods._shared.interference import FillOption, SolverOption, preset
from actmat.methods.contract import Bounds
from actmat.methods.facets import SUM_LAWS

Positive = Annotated[float, Bounds(0, open_low=True)]


def actmat_ridge(*, ridge: Positive = 0.1, null: FillOption = "zero", solver: SolverOption = "auto") -> Rule:
    """`D* = N + (B - N S) (S + rho I)^-1`, `rho = ridge * tr(S) / I`.

    `S = sum_t w_t D_t^T D_t`, `B = sum_t w_t D_t D_t^T D_t`, `N` the fill. Weights are non-negative.

    Args:
        ridge: relative ridge, in units of the mean eigenvalue of `S`.
    """
    return Rule(spectral=Filter("tikhonov", ridge=ridge), null=null, solver=solver)


ACTMAT_RIDGE = preset(
    actmat_ridge,
    "ACTMat with weak directions faded out by a ridge relative to the mean eigenvalue.",
    "D* = (sum_t D_t D_t^T D_t) (sum_t D_t^T D_t + ridge tr(S)/I)^-1",
    "Tikhonov filter of ACTMat (Model Merging via Data-Free Covariance Estimation)",
    laws=SUM_LAWS,
    flops="(2T + 2) N^3",
)
