"""TACT: ACTMat whose covariance estimates come from the largest entries of each delta.

From the ACTMat authors' public code. Small entries of a delta are mostly noise; the estimate `K_t` leaves them out,
while the target stays the whole delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from actmat.linalg.estimators import Estimator
from actmat.linalg.filters import Filter
from actmat.linalg.interference import Null, Rule, Solver
from actmat.methods._shared.interference import merge_rule, stages_of, workspace_of
from actmat.methods.contract import Bounds, Merged, MergeMethod

__all__ = ["TACT", "merge"]


def _rule(
    trim: float = 0.5,
    rtol: float | None = None,
    null: Null = "zero",
    solver: Solver = "auto",
) -> Rule:
    return Rule(Estimator(trim=trim), Filter(rtol=rtol), null, solver)


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    trim: Annotated[float, Bounds(0, 1, open_low=True)] = 0.5,
    rtol: Annotated[float | None, Bounds(0, 1)] = None,
    null: Null = "zero",
    solver: Solver = "auto",
) -> Merged:
    """`D* = (sum_t w_t D_t K_t) (sum_t w_t K_t)^+`, `K_t = trim(D_t)^T trim(D_t)`.

    Args:
        weights: non-negative, one per expert; they multiply `K_t`.
        trim: fraction of the entries of each delta, the largest magnitudes, that estimates `K_t`.
        rtol: relative cut-off in units of the eigenvalues of `S`; default `I * eps(float32)`, in float64 too.
        null: what fills the filtered-out directions: nothing, the sum, or the mean of the deltas.
        solver: which exact form to use, see `actmat`.

    Raises:
        NumericalError: NaN or infinity in a delta.
        ValueError: a negative weight.
    """
    return merge_rule(deltas, _rule(trim, rtol, null, solver), weights)


TACT = MergeMethod(
    name="tact",
    merge=merge,
    acts_on="matrix",
    summary="ACTMat with covariances estimated from the largest entries of each delta.",
    equation="D* = (sum_t D_t K_t) (sum_t K_t)^+, K_t = trim(D_t)^T trim(D_t)",
    reference="Public code of Model Merging via Data-Free Covariance Estimation",
    laws=frozenset(
        {
            "permutation",
            "homogeneous",
            "odd",
            "zero_expert",
            "zeros",
        }
    ),
    one_pass=True,
    workspace=workspace_of(_rule),
    flops="(2T + 3) N^3",
    preset_of="actmat",
    stages=stages_of(_rule),
)
