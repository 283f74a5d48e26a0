"""WUDI: the merged delta that interferes least, in each expert's own row space.

R. Cheng et al., "Whoever Started the Interference Should End It: Guiding Data-Free Model Merging via Task Vectors",
ICML 2025. The objective is a least-squares problem, so its minimiser has a closed form, the default here; the paper
takes a fixed number of Adam steps from the sum of the deltas, which is the other option.
"""

from __future__ import annotations

from typing import Annotated, Literal

from actmat.linalg.interference.descent import Adam
from actmat.linalg.interference.rule import Estimator, Filter, Null, Rule
from actmat.methods._shared.interference import SHARED_LAWS, member
from actmat.methods.contract import Bounds

__all__ = ["WUDI", "rule"]


def rule(
    *,
    optimiser: Literal["closed", "adam"] = "closed",
    rtol: Annotated[float | None, Bounds(0, 1)] = None,
    null: Null = "sum",
    steps: Annotated[int, Bounds(0)] = 300,
    lr: Annotated[float, Bounds(0, open_low=True)] = 1e-5,
) -> Rule | Adam:
    """`D* = argmin_D sum_t w_t ||(D - D_t) D_t^T||_F^2 / ||D_t||_F^2`; a zero delta has no term.

    Where the objective is flat (directions that no delta uses), the closed form takes `N`, the sum by default, as
    gradient descent from the sum would. Weights are non-negative; they multiply the expert's term and, in the fill,
    `D_t`.

    Args:
        optimiser: "closed" for the minimiser; "adam" for `steps` steps of Adam from the sum, as published. Adam's
            steps do not scale with the deltas: `lr` is in the units of the weights.
        rtol: relative cut-off of the closed form, as in `actmat`; default `I * eps(float32)`.
        null: fill `N` of the closed form: nothing, the sum, or the mean of the deltas.
        steps: number of Adam steps.
        lr: Adam's step size.
    """
    if optimiser == "adam":
        return Adam(steps, lr)
    return Rule(Estimator(normalise="norm"), Filter(rtol=rtol), null)


WUDI = member(
    rule,
    name="wudi",
    summary="Least interference in each expert's own row space, every expert counted equally.",
    equation="D* = argmin_D sum_t ||(D - D_t) D_t^T||_F^2 / ||D_t||_F^2",
    reference="Cheng et al., Whoever Started the Interference Should End It, ICML 2025",
    laws=SHARED_LAWS
    | {"single", "identical", "left_orthogonal", "right_orthogonal", "orthogonal_rows_sum", "zero_expert"},
    flops="(2T + 3) N^3",
    preset_of="actmat",
)
