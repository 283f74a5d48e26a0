"""WUDI: the merged delta that interferes least, in each expert's own row space.

R. Cheng et al., "Whoever Started the Interference Should End It: Guiding Data-Free Model Merging via Task Vectors",
ICML 2025. The objective is a least-squares problem, so its minimiser has a closed form, the default here; the paper
takes a fixed number of Adam steps from the sum of the deltas, which is the other option.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, Any, Literal

from torch import Tensor

from actmat.linalg.estimators import Estimator
from actmat.linalg.filters import Filter
from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.interference import Null, Rule, State
from actmat.linalg.interference_descent import Descent, accumulate, descend
from actmat.linalg.interference_workspace import workspace
from actmat.linalg.lowrank import LowRank
from actmat.methods._shared.interference import merge_rule, merge_rule_lowrank, stages_of
from actmat.methods.contract import Bounds, Merged, MergedLowRank, MergeMethod, Stages

__all__ = ["WUDI", "merge", "merge_lowrank"]

Optimiser = Literal["closed", "adam"]


def _rule(rtol: float | None = None, null: Null = "sum") -> Rule:
    return Rule(Estimator(normalise="norm"), Filter(rtol=rtol), null)


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    optimiser: Optimiser = "closed",
    rtol: Annotated[float | None, Bounds(0, 1)] = None,
    null: Null = "sum",
    steps: Annotated[int, Bounds(0)] = 300,
    lr: Annotated[float, Bounds(0, open_low=True)] = 1e-5,
) -> Merged:
    """`D* = argmin_D sum_t w_t ||(D - D_t) D_t^T||_F^2 / ||D_t||_F^2`; a zero delta has no term.

    Where the objective is flat (directions that no delta uses), the closed form takes `N`, the sum by default, as
    gradient descent from the sum would.

    Args:
        weights: non-negative, one per expert; they multiply the expert's term and, in the fill, `D_t`.
        optimiser: "closed" for the minimiser; "adam" for `steps` steps of Adam from the sum, as published. Adam's
            steps do not scale with the deltas: `lr` is in the units of the weights.
        rtol: relative cut-off of the closed form, as in `actmat`; default `I * eps(float32)`.
        null: fill `N` of the closed form: nothing, the sum, or the mean of the deltas.
        steps: number of Adam steps.
        lr: Adam's step size.

    Raises:
        NumericalError: NaN or infinity in a delta.
        ValueError: a negative weight.
    """
    if optimiser == "closed":
        return merge_rule(deltas, _rule(rtol, null), weights)
    return _descended(accumulate(deltas, weights), steps, lr)


def merge_lowrank(
    deltas: Sequence[LowRank],
    *,
    weights: Sequence[float] | None = None,
    optimiser: Optimiser = "closed",
    rtol: float | None = None,
    null: Null = "sum",
    steps: int = 300,
    lr: float = 1e-5,
) -> MergedLowRank:
    """The closed form on factored deltas, exact, of rank at most `sum_t R_t`; options as in `merge`.

    Raises:
        ValueError: `optimiser="adam"`: its steps act entry by entry, so they do not keep the rank.
    """
    if optimiser == "adam":
        raise ValueError(
            "optimiser='adam' is not available for low-rank deltas: Adam scales each entry of the O x I matrix by "
            "itself, which the factors do not show. Merge the dense deltas, or take optimiser='closed'."
        )
    return merge_rule_lowrank(deltas, _rule(rtol, null), weights)


def _descended(start: Descent, steps: int, lr: float) -> Merged:
    value = descend(start, steps, lr)
    stats: dict[str, float | int | str | bool] = {
        "solver": "adam",
        "steps": steps,
        "norm": frobenius_norm64(value),
        "mean_expert_norm": sum(start.norms) / len(start.norms),
    }
    return Merged(value, stats)


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    if options.get("optimiser") != "adam":
        return workspace(shape, n_experts, _rule(**_closed(options)))
    # per batch item: sum, S, residual, result; in work: step, two moments, gradient, root
    item, square = math.prod(shape[-2:]), shape[-1] ** 2
    return math.prod(shape[:-2]) * (2 * item + square) + max(square, (math.prod(shape[:-2]) + 5) * item)


def _closed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the closed form takes."""
    return {name: options[name] for name in ("rtol", "null") if name in options}


def _stages() -> Stages:
    closed = stages_of(_rule)

    def key(options: Mapping[str, Any]) -> Hashable:
        weights = options.get("weights")
        if options.get("optimiser") == "adam":
            return ("interference by descent", None if weights is None else tuple(weights))
        return closed.key({**_closed(options), "weights": weights})

    def prepare(deltas: Sequence[Tensor], *, weights: Sequence[float] | None = None, **options: Any) -> State | Descent:
        if options.get("optimiser") == "adam":
            return accumulate(deltas, weights)
        state: State = closed.prepare(deltas, weights=weights, **_closed(options))
        return state

    def finish(state: State | Descent, *, steps: int = 300, lr: float = 1e-5, **options: Any) -> Merged:
        if isinstance(state, Descent):
            return _descended(state, steps, lr)
        return closed.finish(state, **_closed(options))

    return Stages(key=key, prepare=prepare, finish=finish)


WUDI = MergeMethod(
    name="wudi",
    merge=merge,
    acts_on="matrix",
    summary="Least interference in each expert's own row space, every expert counted equally.",
    equation="D* = argmin_D sum_t ||(D - D_t) D_t^T||_F^2 / ||D_t||_F^2",
    reference="Cheng et al., Whoever Started the Interference Should End It, ICML 2025",
    laws=frozenset(
        {
            "permutation",
            "single",
            "identical",
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
    workspace=_workspace,
    flops="(2T + 3) N^3",
    preset_of="actmat",
    stages=_stages(),
)
