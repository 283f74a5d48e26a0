"""Method `ram`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from actmat.methods.contract import Bounds, MergeMethod
from actmat.methods.facets import Merged, MethodCost


def merge(
    deltas: Sequence[Tensor],
    *,
    epsilon: Annotated[float, Bounds(0)] = 1e-5,
    amplify: Annotated[float, Bounds(0)] = 0.0,
    most: Annotated[float, Bounds(0)] = 0.2,
) -> Merged:
    """Entries that one expert changed stay whole, those that several changed are averaged over these.

        D* = sum_t m_t D_t lambda_t where one expert changed an entry,
             sum_t m_t D_t / sum_t m_t elsewhere

    `m_t` is 1 where `|D_t| > epsilon`. `lambda_t = 1 + amplify min(rho_t, most)`, with `rho_t` the number of entries
    that expert t shares with others over the number that only it changed, in this tensor.

    Args:
        epsilon: largest magnitude that counts as unchanged, in units of the weights.
        amplify: r; 0 is RAM, 0.1 mergekit's ramplus_tl.
        most: alpha, the largest ratio that counts.

    Source:
        X. Yuan et al., "Behavior knowledge merge in reinforced agentic models", 2026, arXiv:2601.13572.
    """
    counts = torch.zeros(deltas[0].shape, dtype=torch.int16, device=deltas[0].device)
    for delta in deltas:
        counts += delta.abs() > epsilon
    value = torch.zeros_like(deltas[0])
    for delta in deltas:
        changed = delta.abs() > epsilon
        alone = changed & (counts == 1)
        n_alone, n_changed = int(alone.sum()), int(changed.sum())
        ratio = (n_changed - n_alone) / max(n_alone, epsilon) if n_alone or epsilon else math.inf
        alone_OI = torch.where(alone, delta * (1.0 + amplify * min(ratio, most)), delta / counts.clamp(min=1))
        value += alone_OI.mul_(changed)
    return Merged(value, {"shared_fraction": float((counts > 1).double().mean())})


RAM = MergeMethod(
    "ram",
    merge,
    "tensor",
    laws=frozenset({"permutation", "odd", "zero_expert", "zeros"}),
    cost=MethodCost(workspace=lambda shape, n_experts, options: 7 * math.prod(shape)),
)
