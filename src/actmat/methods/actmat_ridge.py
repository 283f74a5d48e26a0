"""Method `actmat_ridge`."""

from __future__ import annotations

from typing import Annotated

from actmat.linalg.interference.rule import Filter, InterferenceRule
from actmat.methods._shared.interference import FillOption, SolverOption, preset
from actmat.methods.contract import Bounds
from actmat.methods.facets import SUM_LAWS

Positive = Annotated[float, Bounds(0, open_low=True)]


def actmat_ridge(
    *, ridge: Positive = 0.1, null: FillOption = "zero", solver: SolverOption = "auto"
) -> InterferenceRule:
    """ACTMat with weak directions faded out by a ridge relative to the mean eigenvalue.

        D* = N + (B - N S) (S + ridge tr(S)/I)^-1

    `S = sum_t w_t D_t^T D_t`, `B = sum_t w_t D_t D_t^T D_t`, `N` the fill. The hard cut-off of `actmat` keeps weak
    directions at full strength, however poorly the deltas determine them. The ridge keeps every direction with the
    factor `l / (l + ridge m)`, `l` its eigenvalue and `m` their mean, whose scale depends on the fine-tuning runs; no
    eigendecomposition is needed. Weights are non-negative.

    Args:
        ridge: relative ridge, in units of the mean eigenvalue of `S`.

    Source:
        The Tikhonov filter (1963) of `actmat`.
    """
    return InterferenceRule(spectral=Filter("tikhonov", ridge=ridge), null=null, solver=solver)


ACTMAT_RIDGE = preset(actmat_ridge, SUM_LAWS)
