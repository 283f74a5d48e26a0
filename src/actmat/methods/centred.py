"""ACTMat whose covariance estimates leave out the mean row of each delta: the centring step of ACE without the rest.

The estimate is a covariance over the `O` rows of a delta rather than an uncentred second moment. The whole of ACE is
`ace`, a name that stood for this method before.
"""

from __future__ import annotations

from actmat.linalg.interference.rule import Estimator, Filter, Rule
from actmat.methods._shared.interference import SHARED_LAWS, FillOption, RelativeCutoff, SolverOption, member

__all__ = ["CENTRED", "rule"]


def rule(*, rtol: RelativeCutoff = None, null: FillOption = "zero", solver: SolverOption = "auto") -> Rule:
    """`D* = (sum_t w_t D_t K_t) (sum_t w_t K_t)^+`, `K_t = A_t^T A_t`, `A_t = D_t - 1 mean_O(D_t)^T`.

    Weights are non-negative.
    """
    return Rule(Estimator(centre=True), Filter(rtol=rtol), null, solver)


CENTRED = member(
    rule,
    name="centred",
    summary="ACTMat with the mean row taken out of each delta before its covariance is estimated.",
    equation="D* = (sum_t D_t K_t) (sum_t K_t)^+, K_t = (D_t - mean)^T (D_t - mean)",
    reference="Centring step of ACE-Merging: Data-Free Model Merging with Adaptive Covariance Estimation",
    laws=SHARED_LAWS | {"right_orthogonal", "zero_expert"},
    flops="(2T + 3) N^3",
    preset_of="actmat",
)
