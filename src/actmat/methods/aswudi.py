"""ASWUDI: the WUDI objective solved in the leading directions only, their number computed from the spectrum.

The number of directions is the participation number of the singular values, `ceil((sum sqrt(l))^2 / sum l)`: `I` for
a flat spectrum, 1 for a spike. In the other directions the sum of the deltas stays.
"""

from __future__ import annotations

from actmat.linalg.interference.rule import Estimator, Filter, Rule
from actmat.methods._shared.interference import SHARED_LAWS, FillOption, RelativeCutoff, SolverOption, member

__all__ = ["ASWUDI", "rule"]


def rule(*, rtol: RelativeCutoff = None, null: FillOption = "sum", solver: SolverOption = "auto") -> Rule:
    """`D* = N (I - P) + B S^+ P`, `P` the projector on the `ceil((sum sqrt(l))^2 / sum l)` leading eigenvectors of `S`.

    `S = sum_t w_t D_t^T D_t / ||D_t||_F^2 = V diag(l) V^T`, `B = sum_t w_t D_t D_t^T D_t / ||D_t||_F^2`. Weights are
    non-negative; they multiply `K_t` and, in the fill, `D_t`.
    """
    return Rule(Estimator(normalise="norm"), Filter("adaptive", rtol=rtol), null, solver)


ASWUDI = member(
    rule,
    name="aswudi",
    summary="WUDI solved in as many leading directions as the spectrum's participation number says.",
    equation="D* = N (I - P) + B S^+ P, rank P = ceil((sum sqrt(l))^2 / sum l), N = sum_t D_t",
    reference="WalkerWorldPeace/MLLMerging, public code of ASWUDI",
    laws=SHARED_LAWS | {"single", "left_orthogonal", "right_orthogonal", "orthogonal_rows_sum", "zero_expert"},
    flops="(2T + 3) N^3",
    preset_of="actmat",
)
