"""Presets: rows of one table, each a choice of estimator, filter, fill and options of `actmat`.

A function below takes a preset's options and returns its `Rule`; its docstring documents the method. A row of `PRESETS`
adds texts, laws and cost. Weights are non-negative in all of them.

| preset | idea |
|---|---|
| `actmat_ridge` | The hard cut-off of ACTMat keeps weak directions at full strength, however poorly the deltas determine them; a ridge fades them out. It is relative to the mean eigenvalue of `S`, whose scale depends on the fine-tuning runs. |
| `actmat_bounded` | ACTMat lengthens the merged delta with the number of experts; where `D_t^T D_t` says little about the inputs, as for LoRA, in meaningless directions. Here the average fills the directions that the ridge fades out, and the result is never longer than the average. Found in this project's study of variants (docs/experiments). |
"""  # noqa: E501 - rows of a table

from __future__ import annotations

from typing import Annotated

from actmat.linalg.interference.rule import Filter, Rule
from actmat.methods._shared.interference import FillOption, SolverOption, preset
from actmat.methods.contract import Bounds, MergeMethod
from actmat.methods.facets import MEAN_LAWS, SUM_LAWS

Positive = Annotated[float, Bounds(0, open_low=True)]


def actmat_ridge(*, ridge: Positive = 0.1, null: FillOption = "zero", solver: SolverOption = "auto") -> Rule:
    """`D* = N + (B - N S) (S + rho I)^-1`, `rho = ridge * tr(S) / I`.

    `S = sum_t w_t D_t^T D_t`, `B = sum_t w_t D_t D_t^T D_t`, `N` the fill. Weights are non-negative.

    Args:
        ridge: relative ridge, in units of the mean eigenvalue of `S`.
    """
    return Rule(spectral=Filter("tikhonov", ridge=ridge), null=null, solver=solver)


def actmat_bounded(*, ridge: Positive = 1.0, solver: SolverOption = "auto") -> Rule:
    """`X = N + (B - N S) (S + rho I)^-1`, `D* = X min(1, ||N||_F / ||X||_F)`, `rho = ridge * tr(S) / I`.

    `S = sum_t w_t D_t^T D_t`, `B = sum_t w_t D_t D_t^T D_t`, `N = sum_t w_t D_t / sum_t w_t`. Weights are non-negative.

    Args:
        ridge: relative ridge, in units of the mean eigenvalue of `S`; the larger, the nearer to the average.
    """
    return Rule(spectral=Filter("tikhonov", ridge=ridge), null="mean", solver=solver, bounded=True)


PRESETS: tuple[MergeMethod, ...] = (
    preset(
        actmat_ridge,
        "ACTMat with weak directions faded out by a ridge relative to the mean eigenvalue.",
        "D* = (sum_t D_t D_t^T D_t) (sum_t D_t^T D_t + ridge tr(S)/I)^-1",
        "Tikhonov filter of ACTMat (Model Merging via Data-Free Covariance Estimation)",
        laws=SUM_LAWS,
        flops="(2T + 2) N^3",
    ),
    preset(
        actmat_bounded,
        "ACTMat with a ridge, filled with the average and never longer than it: for adapters, too.",
        "X = N + (B - N S) (S + ridge tr(S)/I)^-1, D* = X min(1, |N|/|X|), N the average",
        "this project's study of variants of ACTMat (Model Merging via Data-Free Covariance Estimation)",
        laws=MEAN_LAWS,
        flops="(2T + 4) N^3",
    ),
)
