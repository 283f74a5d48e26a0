"""Method `della`.

Shapes: `R` rows of `I` entries, `X` rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from actmat.errors import RecipeError
from actmat.extras.research.drop import random_int32
from actmat.linalg.chunks import CHUNK_ENTRIES
from actmat.linalg.masks.election import elect, election_workspace, masked_sum
from actmat.linalg.masks.mask import KEEP_ALL
from actmat.methods._shared.per_expert import per_expert
from actmat.methods.contract import Bounds, Fractions, MergeMethod, Weights
from actmat.methods.facets import Access, Merged, MethodCost


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Weights = None,
    generator: torch.Generator,
    density: Fractions = 0.5,
    epsilon: Annotated[float | list[float], Bounds(0, 0.5)] = 0.15,
    rescale: Literal["inverse", "l1", "none"] = "inverse",
    sign_election: bool = True,
    reduce: Literal["mean", "sum"] = "mean",
) -> Merged:
    """Drop entries at random, small ones more often, rescale, elect signs, average what agrees.

        m_ti ~ Bernoulli(p_i),   p_i = d - epsilon + 2 epsilon r_i
        D* = mean of the w_t m_ti D_ti / p_ti with the elected sign

    `r_i` in [0, 1] is the rank of the magnitude within its row (last axis; a vector is one row), equal magnitudes in
    storage order; a row of one entry has `p = d`.

    Args:
        weights: one per expert, applied after masking; 1 unless given.
        density: mean probability `d` to keep an entry; one for all experts, or a list. 1 keeps all, 0 none.
        epsilon: half the range of the probabilities, `0 < d - epsilon` and `d + epsilon < 1` (the paper's range is
            `2 epsilon`); one for all experts, or a list.
        rescale: `inverse` divides each kept entry by its own probability (the paper; unbiased); `l1` gives each
            masked delta its L1 norm back, by one factor (mergekit's default); `none` leaves the entries.
        sign_election: merge what agrees with the elected sign; off (mergekit's della_linear), sum all.
        reduce: mean (the paper) or sum (mergekit) of the agreeing entries.

    Source:
        P. T. Deep, R. Bhardwaj, S. Poria, "DELLA-Merging: reducing interference in model merging through
        magnitude-based sampling", 2024, arXiv:2406.11617.
    """
    densities = per_expert("density", density, len(deltas))
    epsilons = per_expert("epsilon", epsilon, len(deltas))
    pairs = list(zip(densities, epsilons, strict=True))
    if outside := [(d, e) for d, e in pairs if 0 < d < 1 and not 0 < d - e <= d + e < 1]:
        d, e = outside[0]
        raise RecipeError(
            f"della: density +- epsilon must stay inside (0, 1), got density {d:g} and epsilon {e:g}. Take an epsilon "
            f"below {min(d, 1 - d):g}."
        )
    share = [1.0] * len(deltas) if weights is None else list(weights)
    seeds = torch.randint(2**63 - 1, (len(deltas),), generator=generator).tolist()
    sampled = [
        magnitude_sampled(delta, d, e, rescale=rescale, generator=torch.Generator().manual_seed(seed))
        for delta, (d, e), seed in zip(deltas, pairs, seeds, strict=True)
    ]
    masks = [KEEP_ALL] * len(sampled)
    if not sign_election:
        return Merged(masked_sum(sampled, masks, share))
    return Merged(elect(sampled, masks, scales=share, counts=share, reduce=reduce))


def magnitude_sampled(
    delta: Tensor,
    density: float,
    epsilon: float,
    *,
    rescale: Literal["inverse", "l1", "none"],
    generator: torch.Generator,
) -> Tensor:
    """A delta of which entry `i` is kept with probability `p_i = density - epsilon + 2 epsilon r_i` (DELLA).

    Args:
        delta: any shape; rows are its last axis, a vector is one row.
        density: mean probability; 0 gives zeros, 1 the delta itself.
        epsilon: half the range of the probabilities.
        rescale: divide kept entries by `p_i`, or multiply all by one factor that keeps the L1 norm, or neither.
        generator: gives one uniform number with 24 bits per entry, in storage order.
    """
    if density >= 1 or density <= 0:
        return delta.clone() if density >= 1 else torch.zeros_like(delta)
    width = delta.shape[-1] if delta.dim() else 1
    rows_RI = delta.reshape(math.prod(delta.shape[:-1]), width)
    out_RI = torch.empty_like(rows_RI)
    before, after = 0.0, 0.0
    step = max(2, CHUNK_ENTRIES // max(1, width) // 2 * 2)  # even: two numbers come from one draw
    for x_XI, out_XI in zip(torch.split(rows_RI, step), torch.split(out_RI, step), strict=True):
        keep_XI = (density - epsilon) + 2 * epsilon * normalized_ranks(x_XI.abs())
        uniform_XI = random_int32(x_XI.numel(), generator).view(x_XI.shape).to(x_XI.dtype).mul_(2.0**-32).add_(0.5)
        torch.mul(x_XI, uniform_XI.to(x_XI.device) < keep_XI, out=out_XI)
        if rescale == "inverse":
            out_XI.div_(keep_XI)
        elif rescale == "l1":
            before += float(x_XI.abs().sum(dtype=torch.float64))
            after += float(out_XI.abs().sum(dtype=torch.float64))
    if rescale == "l1" and after > 0:
        out_RI.mul_(before / after)
    return out_RI.view(delta.shape)


def normalized_ranks(scores_RI: Tensor) -> Tensor:
    """Rank of each entry within its row, 0 for the smallest and 1 for the largest; equal entries in storage order.

    A row of one entry has rank 0.5.
    """
    width = scores_RI.shape[-1]
    if width == 1:
        return torch.full_like(scores_RI, 0.5)
    order_RI = scores_RI.sort(dim=-1, stable=True).indices
    rank_I = torch.linspace(0, 1, width, dtype=scores_RI.dtype, device=scores_RI.device)
    return torch.empty_like(scores_RI).scatter_(-1, order_RI, rank_I.expand_as(scores_RI))


DELLA = MergeMethod(
    "della",
    merge,
    "tensor",
    laws=frozenset({"homogeneous", "odd", "zeros"}),
    access=Access(one_pass=True),
    cost=MethodCost(
        workspace=lambda shape, n_experts, options: (
            (n_experts + 1) * math.prod(shape) + election_workspace(math.prod(shape), n_experts)
        )
    ),
    elsewhere=lambda options, n_experts: "mean" if options["sign_election"] and options["reduce"] == "mean" else 1.0,
)
