"""Method `dare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from actmat.extras.research.drop import Drop
from actmat.linalg.masks.election import elect, masked_sum
from actmat.linalg.masks.mask import l1_factors
from actmat.methods._shared.per_expert import per_expert, sum_problem, weights_and_sum, workspace_of_election
from actmat.methods.contract import Fractions, MergeMethod, Weights
from actmat.methods.facets import Access, Elsewhere, Merged, MethodCost


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Weights = None,
    generator: torch.Generator,
    density: Fractions = 0.1,
    rescale: Literal["inverse", "l1", "none"] = "inverse",
    rule: Literal["task_arithmetic", "average", "linear", "ties"] = "task_arithmetic",
    scaling: float = 0.4,
    reduce: Literal["mean", "sum"] = "mean",
) -> Merged:
    """Drop entries of each delta at random, rescale the rest, then merge by a second rule.

        D* = rule(m_1 D_1 / d, ..., m_T D_T / d),   m_t ~ Bernoulli(d) per entry

    `E[m D / d] = D`, and sparse deltas of different experts overlap less. The masks depend only on the generator: one
    seed per expert is drawn from it, in expert order, and each mask is drawn in the order of the entries, exact to
    2^-50 in probability (see `drop.Drop`).

    Args:
        weights: one per expert, applied after masking; 1 unless given.
        density: probability `d` to keep an entry (1 - drop rate); one for all experts, or a list.
        rescale: `inverse` divides by the density (the paper); `l1` gives each masked delta its L1 norm back, by one
            factor (mergekit's default); `none` leaves the entries.
        rule: `task_arithmetic`, scaling times the weighted sum; `linear`, the weighted sum (mergekit's dare_linear);
            `average`, the weighted mean; `ties`, sign election without another trim (the random mask replaces it).
        scaling: lambda of `task_arithmetic`; the other rules ignore it.
        reduce: mean or sum of the agreeing entries in `ties`; mergekit's dare_ties sums.

    Raises:
        RecipeError: `rule="average"` with weights that sum to zero.

    Source:
        L. Yu et al., "Language models are super mario: absorbing abilities from homologous models as a free lunch",
        ICML 2024, arXiv:2311.03099.
    """
    densities = per_expert("density", density, len(deltas))
    share, total = weights_and_sum(weights, len(deltas), is_mean=rule == "average")
    masks = drops(densities, generator)
    if rescale == "l1":
        factors = l1_factors([delta.reshape(-1) for delta in deltas], masks)
    else:
        factors = [1 / d if rescale == "inverse" and d > 0 else 1.0 for d in densities]
    scales = [w * f for w, f in zip(share, factors, strict=True)]
    if rule == "ties":
        return Merged(elect(deltas, masks, scales=scales, counts=share, reduce=reduce))
    common = scaling if rule == "task_arithmetic" else 1 / total if rule == "average" else 1.0
    return Merged(masked_sum(deltas, masks, [common * s for s in scales]))


def drops(densities: Sequence[float], generator: torch.Generator) -> list[Drop]:
    """One random mask per expert, with seeds drawn from the generator in expert order."""
    seeds = torch.randint(2**63 - 1, (len(densities),), generator=generator).tolist()
    return [Drop(d, seed) for d, seed in zip(densities, seeds, strict=True)]


def _elsewhere(options: Mapping[str, Any], n_experts: int) -> Elsewhere:
    if options["rule"] == "task_arithmetic":
        return float(options["scaling"])
    is_mean = options["rule"] == "average" or (options["rule"] == "ties" and options["reduce"] == "mean")
    return "mean" if is_mean else 1.0


DARE = MergeMethod(
    "dare",
    merge,
    "tensor",
    laws=frozenset({"homogeneous", "odd", "zeros"}),
    access=Access(streams=lambda options: options["rescale"] != "l1"),  # which reads the deltas before it adds them
    cost=MethodCost(workspace=workspace_of_election),
    weights_problem=lambda options, weights: sum_problem(weights) if options["rule"] == "average" else None,
    elsewhere=_elsewhere,
)
