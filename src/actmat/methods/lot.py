"""LOT Merging: least drift of the merged model's features, layer by layer.

W. Sun et al., "Towards Minimizing Feature Drift in Model Merging: Layer-wise Task Vector Fusion for Adaptive
Knowledge Integration", NeurIPS 2025. For linear layers its solution is RegMean in the delta form, with plain Grams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from torch import Tensor

from actmat.linalg.lowrank import LowRank
from actmat.methods import regmean
from actmat.methods.contract import Bounds, Merged, MergedLowRank, MergeMethod

__all__ = ["LOT", "merge", "merge_lowrank"]


def merge(
    deltas: Sequence[Tensor],
    *,
    statistics: Mapping[str, Sequence[Tensor]] | None = None,
    weights: Sequence[float] | None = None,
    rtol: Annotated[float | None, Bounds(0, 1)] = None,
) -> Merged:
    """`D* = (sum_t w_t D_t X_t^T X_t) (sum_t w_t X_t^T X_t)^+ = argmin_D sum_t w_t ||X_t (D - D_t)^T||_F^2`.

    Args:
        statistics: `"gram"`: `X_t^T X_t`, one `I x I` matrix per expert.
        weights: non-negative, one per expert; they multiply its Gram.
        rtol: relative cut-off in units of the eigenvalues of the summed Gram; default `I * eps(float32)`.

    Raises:
        StatisticsError: no Gram matrices, or of the wrong number or shape.
        NumericalError: NaN or infinity in a delta.
        ValueError: a negative weight.
    """
    return regmean.merge(deltas, statistics=statistics, weights=weights, rtol=rtol)


def merge_lowrank(
    deltas: Sequence[LowRank],
    *,
    statistics: Mapping[str, Sequence[Tensor]] | None = None,
    weights: Sequence[float] | None = None,
    rtol: float | None = None,
) -> MergedLowRank:
    """`merge` on factored deltas, exact, of rank at most `sum_t R_t`; options as there. Still `O(I^3)`."""
    return regmean.merge_lowrank(deltas, statistics=statistics, weights=weights, rtol=rtol)


LOT = MergeMethod(
    name="lot",
    merge=merge,
    acts_on="matrix",
    summary="Least drift of each layer's features on the experts' data.",
    equation="D* = (sum_t D_t X_t^T X_t) (sum_t X_t^T X_t)^+",
    reference="Sun et al., Layer-wise Task Vector Fusion for Adaptive Knowledge Integration, NeurIPS 2025",
    laws=regmean.REGMEAN.laws,
    merge_lowrank=merge_lowrank,
    one_pass=True,
    needs_statistics=("gram",),
    workspace=regmean.REGMEAN.workspace,
    flops="(T + 3) N^3",
    preset_of="regmean",
    stages=regmean.REGMEAN.stages,
)
