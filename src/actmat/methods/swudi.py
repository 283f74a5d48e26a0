"""SWUDI: the WUDI objective, solved softly: gradient flow from the sum of the deltas, stopped at a finite time.

WUDI's few Adam steps stop long before the minimiser, and do better for it. The exponential filter is that early stop
in closed form: direction by direction, `1 - exp(-l t)` of the way from the sum to the minimiser.
"""

from __future__ import annotations

from typing import Annotated, Literal

from actmat.linalg.interference.rule import Estimator, Filter, Rule
from actmat.methods._shared.interference import SHARED_LAWS, FillOption, SolverOption, member
from actmat.methods.contract import Bounds

__all__ = ["SWUDI", "rule"]


def rule(
    *,
    filter: Literal["exponential", "tikhonov"] = "exponential",
    time: Annotated[float, Bounds(0, open_low=True)] = 300.0,
    ridge: Annotated[float, Bounds(0, open_low=True)] = 0.1,
    null: FillOption = "sum",
    solver: SolverOption = "auto",
) -> Rule:
    """`D* = N (I - V f(l) V^T) + B V (f(l) / l) V^T`, `S = sum_t w_t D_t^T D_t / ||D_t||_F^2 = V diag(l) V^T`.

    Weights are non-negative; they multiply `K_t` and, in the fill, `D_t`.

    Args:
        filter: "exponential" `f = 1 - exp(-l time)`, or "tikhonov" `f = l / (l + ridge tr(S) / I)`.
        time: stopping time, in units of the eigenvalues of `S`, whose trace is the number of experts that moved.
        ridge: relative ridge of the "tikhonov" filter, in units of the mean eigenvalue.
    """
    spectral = Filter(filter, ridge=ridge, time=time, time_is_absolute=True)
    return Rule(Estimator(normalise="norm"), spectral, null, solver)


SWUDI = member(
    rule,
    name="swudi",
    summary="WUDI solved softly: gradient flow from the sum of the deltas, stopped at a finite time.",
    equation="D* = N (I - V f V^T) + B V (f / l) V^T, f = 1 - exp(-l t), N = sum_t D_t",
    reference="WalkerWorldPeace/MLLMerging, public code of SWUDI",
    laws=SHARED_LAWS | {"single", "left_orthogonal", "right_orthogonal", "orthogonal_rows_sum", "zero_expert"},
    flops="(2T + 3) N^3",
    preset_of="actmat",
)
