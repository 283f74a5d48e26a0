"""Average of the experts ("model soup").

M. Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy without
increasing inference time", ICML 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from actmat.linalg.inner import one_pass_sum
from actmat.linalg.lowrank import LowRank, weighted_sum
from actmat.methods.contract import Merged, MergedLowRank, MergeMethod

__all__ = ["AVERAGE", "merge", "merge_lowrank"]


def merge(deltas: Sequence[Tensor], *, weights: Sequence[float] | None = None) -> Merged:
    """`D* = sum_t w_t D_t / sum_t w_t`, all weights 1 unless given.

    Args:
        weights: one per expert; their sum must not be zero.
    """
    share = [1.0] * len(deltas) if weights is None else list(weights)
    total = sum(share)
    if total == 0:
        raise ValueError("average: the weights sum to zero")
    return Merged(one_pass_sum(deltas, share).div_(total))


def merge_lowrank(deltas: Sequence[LowRank], *, weights: Sequence[float] | None = None) -> MergedLowRank:
    """The same mean in factored form, of rank `sum_t R_t` at most.

    Args:
        weights: one per expert; their sum must not be zero.
    """
    share = [1.0] * len(deltas) if weights is None else list(weights)
    total = sum(share)
    if total == 0:
        raise ValueError("average: the weights sum to zero")
    return MergedLowRank(weighted_sum(deltas, [w / total for w in share]))


AVERAGE = MergeMethod(
    name="average",
    merge=merge,
    merge_lowrank=merge_lowrank,
    acts_on="elementwise",
    summary="Mean of the experts' deltas.",
    equation="D* = sum_t w_t D_t / sum_t w_t",
    reference="Wortsman et al., Model soups, ICML 2022",
    laws=frozenset(
        {
            "permutation",
            "single",
            "identical",
            "homogeneous",
            "odd",
            "left_orthogonal",
            "right_orthogonal",
            "zeros",
        }
    ),
    one_pass=True,
    workspace=lambda shape, n_experts, options: math.prod(shape),
    flops="T N^2",
)
