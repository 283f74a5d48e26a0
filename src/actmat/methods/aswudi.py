"""ASWUDI: the WUDI objective solved in the leading directions alone, their number read off the spectrum.

The number of directions is the participation number of the singular values, `ceil((sum sqrt(l))^2 / sum l)`: `I` for
a flat spectrum, 1 for a spike. In the other directions the sum of the deltas stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from actmat.linalg.estimators import Estimator
from actmat.linalg.filters import Filter
from actmat.linalg.interference import Null, Rule, Solver
from actmat.linalg.lowrank import LowRank
from actmat.methods._shared.interference import merge_rule, merge_rule_lowrank, stages_of, workspace_of
from actmat.methods.contract import Bounds, Merged, MergedLowRank, MergeMethod

__all__ = ["ASWUDI", "merge", "merge_lowrank"]


def _rule(
    rtol: float | None = None,
    null: Null = "sum",
    solver: Solver = "auto",
) -> Rule:
    return Rule(Estimator(normalise="norm"), Filter("adaptive", rtol=rtol), null, solver)


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    rtol: Annotated[float | None, Bounds(0, 1)] = None,
    null: Null = "sum",
    solver: Solver = "auto",
) -> Merged:
    """`D* = N (I - P) + B S^+ P`, `P` the projector on the `ceil((sum sqrt(l))^2 / sum l)` leading eigenvectors of `S`.

    `S = sum_t w_t D_t^T D_t / ||D_t||_F^2 = V diag(l) V^T`, `B = sum_t w_t D_t D_t^T D_t / ||D_t||_F^2`.

    Args:
        weights: non-negative, one per expert; they multiply `K_t` and, in the fill, `D_t`.
        rtol: relative cut-off in units of the eigenvalues of `S`; default `I * eps(float32)`, in float64 too.
        null: what fills the filtered-out directions: nothing, the sum, or the mean of the deltas.
        solver: which exact form to use, see `actmat`.

    Raises:
        NumericalError: NaN or infinity in a delta.
        ValueError: a negative weight.
    """
    return merge_rule(deltas, _rule(rtol, null, solver), weights)


def merge_lowrank(
    deltas: Sequence[LowRank],
    *,
    weights: Sequence[float] | None = None,
    rtol: float | None = None,
    null: Null = "sum",
    solver: Solver = "auto",
) -> MergedLowRank:
    """`merge` on factored deltas, exact, of rank at most `sum_t R_t`; options as there."""
    return merge_rule_lowrank(deltas, _rule(rtol, null, solver), weights)


ASWUDI = MergeMethod(
    name="aswudi",
    merge=merge,
    acts_on="matrix",
    summary="WUDI solved in as many leading directions as the spectrum's participation number says.",
    equation="D* = N (I - P) + B S^+ P, rank P = ceil((sum sqrt(l))^2 / sum l), N = sum_t D_t",
    reference="WalkerWorldPeace/MLLMerging, public code of ASWUDI",
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
