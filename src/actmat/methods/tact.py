"""TACT: ACTMat whose covariance estimates come from the largest entries of each delta.

From the ACTMat authors' public code. Small entries of a delta are mostly noise; the estimate `K_t` leaves them out,
while the target stays the whole delta.
"""

from __future__ import annotations

from typing import Annotated

from actmat.linalg.interference.rule import Estimator, Filter, Rule
from actmat.methods._shared.interference import SHARED_LAWS, FillOption, RelativeCutoff, SolverOption, member
from actmat.methods.contract import Bounds

__all__ = ["TACT", "rule"]


def rule(
    *,
    trim: Annotated[float, Bounds(0, 1, open_low=True)] = 0.5,
    rtol: RelativeCutoff = None,
    null: FillOption = "zero",
    solver: SolverOption = "auto",
) -> Rule:
    """`D* = (sum_t w_t D_t K_t) (sum_t w_t K_t)^+`, `K_t = trim(D_t)^T trim(D_t)`. Weights are non-negative.

    Args:
        trim: fraction of the entries of each delta, the largest magnitudes, that estimates `K_t`.
    """
    return Rule(Estimator(trim=trim), Filter(rtol=rtol), null, solver)


TACT = member(
    rule,
    has_lowrank=False,
    name="tact",
    summary="ACTMat with covariances estimated from the largest entries of each delta.",
    equation="D* = (sum_t D_t K_t) (sum_t K_t)^+, K_t = trim(D_t)^T trim(D_t)",
    reference="Public code of Model Merging via Data-Free Covariance Estimation",
    laws=SHARED_LAWS | {"zero_expert"},
    flops="(2T + 3) N^3",
    preset_of="actmat",
)
