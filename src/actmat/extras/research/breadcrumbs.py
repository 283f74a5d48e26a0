"""Method `breadcrumbs`.

Shapes: `P` entries of one chunk of a flattened tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.chunks import shape_and_dtype
from actmat.linalg.masks.election import elect, masked_sum
from actmat.linalg.masks.mask import Trim, l1_factors, top_trims
from actmat.methods._shared.per_expert import per_expert, workspace_of_election
from actmat.methods.contract import Fractions, MergeMethod, Weights
from actmat.methods.facets import Access, Merged, MethodCost


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Weights = None,
    density: Fractions = 0.9,
    gamma: Fractions = 0.01,
    scaling: float = 0.3,
    sign_election: bool = False,
    reduce: Literal["mean", "sum"] = "sum",
    rescale: Literal["none", "l1"] = "none",
) -> Merged:
    """Drop the smallest entries and the largest outliers of each delta, then sum.

        D* = scaling sum_t w_t band(D_t)

    `band` drops the `gamma N` largest magnitudes and as many of the smallest as leaves `density N` entries. Ranks are
    taken within the tensor; equal magnitudes rank in storage order, so that counts are exact: `int(gamma N)` dropped at
    the top, `int(density N)` kept.

    Args:
        density: fraction of the entries to keep; one for all experts, or a list. 1 keeps everything.
        gamma: fraction of the entries to drop at the top, at most 1 - density; one for all experts, or a list.
        scaling: lambda; 0.3 is the paper's choice, 1 is mergekit's.
        sign_election: merge what agrees with the elected sign (mergekit's breadcrumbs_ties).
        reduce: mean or sum of the agreeing entries, with `sign_election`.
        rescale: `l1` gives each masked delta its L1 norm back, by one factor (mergekit's `rescale`); `none` leaves it.

    Source:
        M. Davari, E. Belilovsky, "Model breadcrumbs: scaling multi-task model merging with sparse masks", ECCV 2024,
        arXiv:2312.06795.
    """
    densities = per_expert("density", density, len(deltas))
    gammas = per_expert("gamma", gamma, len(deltas))
    share = [1.0] * len(deltas) if weights is None else list(weights)
    masks = bands(deltas, densities, gammas)
    scales = share
    if rescale == "l1":
        scales = [w * f for w, f in zip(share, l1_factors([d.reshape(-1) for d in deltas], masks), strict=True)]
    if not sign_election:
        return Merged(masked_sum(deltas, masks, [scaling * w for w in scales]))
    value = elect(deltas, masks, scales=scales, counts=share, reduce=reduce, zero_sign="positive")
    return Merged(value.mul_(scaling))


@dataclass(frozen=True, slots=True)
class Band:
    """Keeps the entries that `low` keeps and `high` drops: neither the smallest nor the largest (breadcrumbs)."""

    low: Trim
    high: Trim

    def apply(self, chunk_P: Tensor, start: int, out_P: Tensor) -> None:
        """See `Mask`. The entries of `high` are among those of `low`, so the difference is exact."""
        large_P = torch.empty_like(out_P)
        self.high.apply(chunk_P, start, large_P)
        self.low.apply(chunk_P, start, out_P)
        out_P.sub_(large_P)


def bands(deltas: Sequence[Tensor], densities: Sequence[float], gammas: Sequence[float]) -> list[Band]:
    """Per delta of `N` entries, the mask of the `int(density N)` below the `int(gamma N)` largest magnitudes.

    When the largest and the kept entries exceed `N` together, fewer of the largest are dropped. Deltas may be streamed.
    """
    total = math.prod(shape_and_dtype(deltas)[0])
    ranks = []
    for density, gamma in zip(densities, gammas, strict=True):
        count = int(density * total)
        dropped = min(int(gamma * total), total - count)
        ranks.append([count + dropped, dropped])
    return [Band(low, high) for (low, _), (high, _) in top_trims(deltas, ranks, exact=True)]


BREADCRUMBS = MergeMethod(
    "breadcrumbs",
    merge,
    "tensor",
    laws=frozenset({"permutation", "homogeneous", "odd", "zero_expert", "zeros"}),
    access=Access(streams=lambda options: options["rescale"] == "none", walks_again=True),
    cost=MethodCost(workspace=workspace_of_election),
    elsewhere=lambda options, n_experts: (
        "mean" if options["sign_election"] and options["reduce"] == "mean" else float(options["scaling"])
    ),
)
