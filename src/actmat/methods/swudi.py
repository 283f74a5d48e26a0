"""SWUDI: the WUDI objective, solved softly: gradient flow from the sum of the deltas, stopped at a finite time.

WUDI's few Adam steps stop long before the minimiser, and do better for it. The exponential filter is that early stop
in closed form: direction by direction, `1 - exp(-l t)` of the way from the sum to the minimiser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from torch import Tensor

from actmat.linalg.estimators import Estimator
from actmat.linalg.filters import Filter
from actmat.linalg.interference import Null, Rule, Solver
from actmat.linalg.lowrank import LowRank
from actmat.methods._shared.interference import merge_rule, merge_rule_lowrank, stages_of, workspace_of
from actmat.methods.contract import Bounds, Merged, MergedLowRank, MergeMethod

__all__ = ["SWUDI", "merge", "merge_lowrank"]


def _rule(
    filter: Literal["exponential", "tikhonov"] = "exponential",
    time: float = 300.0,
    ridge: float = 0.1,
    null: Null = "sum",
    solver: Solver = "auto",
) -> Rule:
    spectral = Filter(filter, ridge=ridge, time=time, time_is_absolute=True)
    return Rule(Estimator(normalise="norm"), spectral, null, solver)


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    filter: Literal["exponential", "tikhonov"] = "exponential",
    time: Annotated[float, Bounds(0, open_low=True)] = 300.0,
    ridge: Annotated[float, Bounds(0, open_low=True)] = 0.1,
    null: Null = "sum",
    solver: Solver = "auto",
) -> Merged:
    """`D* = N (I - V f(l) V^T) + B V (f(l) / l) V^T`, `S = sum_t w_t D_t^T D_t / ||D_t||_F^2 = V diag(l) V^T`.

    Args:
        weights: non-negative, one per expert; they multiply `K_t` and, in the fill, `D_t`.
        filter: "exponential" `f = 1 - exp(-l time)`, or "tikhonov" `f = l / (l + ridge tr(S) / I)`.
        time: stopping time, in units of the eigenvalues of `S`, whose trace is the number of experts that moved.
        ridge: relative ridge of the "tikhonov" filter, in units of the mean eigenvalue.
        null: what fills the filtered-out directions: nothing, the sum, or the mean of the deltas.
        solver: which exact form to use, see `actmat`.

    Raises:
        NumericalError: NaN or infinity in a delta.
        ValueError: a negative weight.
    """
    return merge_rule(deltas, _rule(filter, time, ridge, null, solver), weights)


def merge_lowrank(
    deltas: Sequence[LowRank],
    *,
    weights: Sequence[float] | None = None,
    filter: Literal["exponential", "tikhonov"] = "exponential",
    time: float = 300.0,
    ridge: float = 0.1,
    null: Null = "sum",
    solver: Solver = "auto",
) -> MergedLowRank:
    """`merge` on factored deltas, exact, of rank at most `sum_t R_t`; options as there."""
    return merge_rule_lowrank(deltas, _rule(filter, time, ridge, null, solver), weights)


SWUDI = MergeMethod(
    name="swudi",
    merge=merge,
    acts_on="matrix",
    summary="WUDI solved softly: gradient flow from the sum of the deltas, stopped at a finite time.",
    equation="D* = N (I - V f V^T) + B V (f / l) V^T, f = 1 - exp(-l t), N = sum_t D_t",
    reference="WalkerWorldPeace/MLLMerging, public code of SWUDI",
    laws=frozenset(
        {
            "permutation",
            "single",
            "homogeneous",
            "odd",
            "left_orthogonal",
            "right_orthogonal",
            "orthogonal_rows_sum",
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
