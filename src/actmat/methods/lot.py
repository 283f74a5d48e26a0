"""LOT Merging: least drift of the merged model's features, layer by layer.

W. Sun et al., "Towards Minimizing Feature Drift in Model Merging: Layer-wise Task Vector Fusion for Adaptive
Knowledge Integration", NeurIPS 2025. For linear layers its solution is RegMean in the delta form, with plain Grams.
"""

from __future__ import annotations

from typing import Annotated

from actmat.linalg.interference.rule import Rule
from actmat.methods import regmean
from actmat.methods._shared.interference import member
from actmat.methods.contract import Bounds

__all__ = ["LOT", "rule"]


def rule(*, rtol: Annotated[float | None, Bounds(0, 1)] = None) -> Rule:
    """`D* = (sum_t w_t D_t X_t^T X_t) (sum_t w_t X_t^T X_t)^+ = argmin_D sum_t w_t ||X_t (D - D_t)^T||_F^2`.

    The statistics "gram" are `X_t^T X_t`, one `I x I` matrix per expert. Weights are non-negative; they multiply it.

    Args:
        rtol: relative cut-off in units of the eigenvalues of the summed Gram; default `I * eps(float32)`.
    """
    return regmean.rule(rtol=rtol)


LOT = member(
    rule,
    has_grams=True,
    name="lot",
    summary="Least drift of each layer's features on the experts' data.",
    equation="D* = (sum_t D_t X_t^T X_t) (sum_t X_t^T X_t)^+",
    reference="Sun et al., Layer-wise Task Vector Fusion for Adaptive Knowledge Integration, NeurIPS 2025",
    laws=regmean.REGMEAN.laws,
    flops="(T + 3) N^3",
    preset_of="regmean",
)
