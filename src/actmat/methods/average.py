"""Average of the experts ("model soup").

M. Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy without
increasing inference time", ICML 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from actmat.errors import RecipeError
from actmat.linalg.inner import one_pass_sum
from actmat.linalg.lowrank import LowRank, weighted_sum
from actmat.methods.contract import Merged, MergedLowRank, MergeMethod

__all__ = ["AVERAGE", "merge", "merge_lowrank"]


def merge(deltas: Sequence[Tensor], *, weights: Sequence[float] | None = None) -> Merged:
    """`D* = sum_t w_t D_t / sum_t w_t`, all weights 1 unless given.

    Args:
        weights: one per expert; their sum must not be zero.

    Raises:
        RecipeError: the weights sum to zero.

    >>> import torch
    >>> merge([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])]).value.tolist()
    [2.0, 1.0]
    """
    share, total = _shares(len(deltas), weights)
    return Merged(one_pass_sum(deltas, share).div_(total))


def merge_lowrank(deltas: Sequence[LowRank], *, weights: Sequence[float] | None = None) -> MergedLowRank:
    """The same mean in factored form, of rank `sum_t R_t` at most.

    Args:
        weights: one per expert; their sum must not be zero.

    Raises:
        RecipeError: the weights sum to zero.
    """
    share, total = _shares(len(deltas), weights)
    return MergedLowRank(weighted_sum(deltas, [w / total for w in share]))


def _lowrank_problem(options: Mapping[str, Any], n_experts: int, weights: Sequence[float] | None) -> str | None:
    _shares(n_experts, weights)
    return None


def _shares(n_experts: int, weights: Sequence[float] | None) -> tuple[list[float], float]:
    """The weights and their sum."""
    share = [1.0] * n_experts if weights is None else list(weights)
    total = math.fsum(share)
    if total == 0:
        raise RecipeError(
            f"average: expected weights with a sum other than 0, got {share}; the mean divides by it. "
            "Change the weights, or use task_arithmetic for differences of experts."
        )
    return share, total


AVERAGE = MergeMethod(
    name="average",
    merge=merge,
    merge_lowrank=merge_lowrank,
    lowrank_when=_lowrank_problem,
    acts_on="elementwise",
    summary="Mean of the experts' deltas.",
    equation="D* = sum_t w_t D_t / sum_t w_t",
    reference="Wortsman et al., Model soups, ICML 2022",
    laws=frozenset(
        {"permutation", "single", "identical", "homogeneous", "odd", "left_orthogonal", "right_orthogonal", "zeros"}
    ),
    one_pass=True,
    workspace=lambda shape, n_experts, options: math.prod(shape),
    flops="T N^2",
)
