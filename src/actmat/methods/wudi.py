"""WUDI: the merged delta that interferes least, in each expert's own row space.

R. Cheng et al., "Whoever Started the Interference Should End It: Guiding Data-Free Model Merging via Task Vectors",
ICML 2025. The objective is a least-squares problem, so its minimiser has a closed form, the default here; the paper
takes a fixed number of Adam steps from the sum of the deltas, which is the other option.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from actmat.linalg import interference
from actmat.linalg.estimators import Estimator
from actmat.linalg.filters import Filter
from actmat.linalg.interference import Null, Rule, State
from actmat.linalg.interference_workspace import workspace
from actmat.linalg.lowrank import LowRank
from actmat.methods._interference import merge_rule, merge_rule_lowrank, stages_of
from actmat.methods.contract import Bounds, Merged, MergedLowRank, MergeMethod, Stages

__all__ = ["WUDI", "merge", "merge_lowrank"]

Optimiser = Literal["closed", "adam"]

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


def _rule(
    optimiser: Optimiser = "closed",
    rtol: float | None = None,
    null: Null = "sum",
    steps: int = 300,
    lr: float = 1e-5,
) -> Rule:
    # Adam starts at the sum and needs S itself: its moments are those of null="sum" in the primal form.
    adam = optimiser == "adam"
    return Rule(Estimator(normalise="norm"), Filter(rtol=rtol), "sum" if adam else null, "eigh" if adam else "auto")


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
    rule = _rule(optimiser, rtol, null, steps, lr)
    if optimiser == "closed":
        return merge_rule(deltas, rule, weights)
    return _descend(interference.prepare(deltas, rule, weights=weights), steps, lr)


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
    return merge_rule_lowrank(deltas, _rule(optimiser, rtol, null, steps, lr), weights)


def _descend(state: State, steps: int, lr: float) -> Merged:
    """Adam on the objective, whose gradient `2 (D S - B)` needs the accumulated moments alone.

    D. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """
    assert state.sum_BOI is not None and state.left_BOI is not None
    value = state.sum_BOI.clone()
    (beta1, beta2), eps = ADAM_BETAS, ADAM_EPS
    for item, reduced in enumerate(state.items):
        assert reduced.gram_NN is not None
        point_OI, left_OI = value[item], reduced.left_ON
        mean_OI, square_OI = torch.zeros_like(point_OI), torch.zeros_like(point_OI)
        for step in range(1, steps + 1):
            gradient_OI = torch.addmm(left_OI, point_OI, reduced.gram_NN, beta=-2, alpha=2)
            mean_OI.lerp_(gradient_OI, 1 - beta1)
            square_OI.mul_(beta2).addcmul_(gradient_OI, gradient_OI, value=1 - beta2)
            root = square_OI.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
            point_OI.addcdiv_(mean_OI, root, value=-lr / (1 - beta1**step))
    norms = [math.sqrt(n) for n in state.squared_norms]
    stats: dict[str, float | int | str | bool] = {
        "solver": "adam",
        "steps": steps,
        "norm": float(torch.linalg.vector_norm(value, dtype=torch.float64)),
        "mean_expert_norm": sum(norms) / len(norms),
    }
    return Merged(value.view(state.shape), stats)


def _workspace(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    if options.get("optimiser") != "adam":
        return workspace(shape, n_experts, _rule(**options))
    # per batch: B, the sum, the result, S; per item: gradient, two moments, root
    item = math.prod(shape[-2:])
    return math.prod(shape[:-2]) * (3 * item + shape[-1] ** 2) + 4 * item


def _stages() -> Stages:
    closed = stages_of(_rule)

    def finish(
        state: State, *, optimiser: Optimiser = "closed", steps: int = 300, lr: float = 1e-5, **options: Any
    ) -> Merged:
        if optimiser == "adam":
            return _descend(state, steps, lr)
        return closed.finish(state, optimiser=optimiser, **options)

    return Stages(key=closed.key, prepare=closed.prepare, finish=finish)


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
