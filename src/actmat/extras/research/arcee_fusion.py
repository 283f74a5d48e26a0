"""Method `arcee_fusion`.

Shapes: `N` entries of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from actmat.methods._shared.per_expert import given_base
from actmat.methods.contract import Bounds, MergeMethod
from actmat.methods.facets import Merged, MethodCost

_FLOOR = 1e-8
"""Added to probabilities."""


def merge(deltas: Sequence[Tensor], *, base: Tensor, spread: Annotated[float, Bounds(0)] = 1.5) -> Merged:
    """One expert's delta where it changes the softmax of its row most, the base elsewhere.

        D* = D where i >= median(i) + spread (q_3 - q_1), else 0
        i = |D| KL(softmax(W) || softmax(W_0))

    The softmax is over the last axis, so that each row has one divergence. Quantiles are entries of the tensor,
    `sorted[floor(q (N - 1))]`. float64 inside.

    Args:
        spread: of the threshold, in units of the range between the quartiles.

    Source:
        Arcee AI, mergekit, 2025.
    """
    if len(deltas) != 1:
        raise ValueError(f"arcee_fusion: the rule is for the base and one expert, not {len(deltas)} experts")
    wide = given_base("arcee_fusion", base).to(torch.float64)
    p, q = ((x.softmax(-1) + _FLOOR) for x in (wide + deltas[0], wide))
    importance = (p * (p / q).log()).sum(-1, keepdim=True) * deltas[0].abs()
    sorted_N = importance.reshape(-1).sort().values
    first, middle, third = (float(sorted_N[math.floor(k / 4 * (len(sorted_N) - 1))]) for k in (1, 2, 3))
    is_important = importance >= middle + spread * (third - first)
    stats = {"kept_fraction": float(is_important.double().mean())}
    return Merged(torch.where(is_important, deltas[0], torch.zeros_like(deltas[0])), stats)


ARCEE_FUSION = MergeMethod(
    "arcee_fusion",
    merge,
    "tensor",
    laws=frozenset({"zeros"}),
    cost=MethodCost(workspace=lambda shape, n_experts, options: 16 * math.prod(shape)),
    max_experts=1,
)
