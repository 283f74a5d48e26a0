"""DELLA: drop entries at random, small ones more often, rescale, then elect signs and merge.

P. Deep et al., "DELLA-Merging: reducing interference in model merging through magnitude-based sampling", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from actmat.errors import RecipeError
from actmat.linalg.masks.election import elect, election_workspace, masked_sum
from actmat.linalg.masks.mask import Keep, magnitude_sampled
from actmat.methods._shared.per_expert import per_expert
from actmat.methods.contract import Bounds, Fractions, MergeMethod, Weights
from actmat.methods.facets import About, Access, Cost, Merged


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
    """Keep entry `i` of a row with probability `p_i = d - epsilon + 2 epsilon r_i`, then elect and merge.

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
    masks = [Keep()] * len(sampled)
    if not sign_election:
        return Merged(masked_sum(sampled, masks, share))
    return Merged(elect(sampled, masks, scales=share, counts=share, reduce=reduce))


DELLA = MergeMethod(
    "della",
    merge,
    "tensor",
    About(
        "Drop entries at random, small ones more often, rescale, elect signs, average what agrees.",
        "m_ti ~ Bernoulli(d - e + 2 e rank_i); D* = mean of the w_t m_ti D_ti / p_ti with the elected sign",
        "Deep et al., DELLA-Merging, 2024",
    ),
    laws=frozenset({"homogeneous", "odd", "zeros"}),
    access=Access(one_pass=True),
    cost=Cost(
        "T N^2 log N",
        workspace=lambda shape, n_experts, options: (
            (n_experts + 1) * math.prod(shape) + election_workspace(math.prod(shape), n_experts)
        ),
    ),
)
