"""Method `fisher`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from actmat.methods.contract import Bounds, MergeMethod, Weights
from actmat.methods.facets import Access, Merged, MethodCost

_NOWHERE = 1e-30
"""Added to every Fisher entry, far below any real one: entries without Fisher information get the mean."""


def merge(
    deltas: Sequence[Tensor],
    *,
    statistics: Mapping[str, Sequence[Tensor]],
    weights: Weights = None,
    floor: Annotated[float, Bounds(0)] = 1e-6,
    floor_unit: Literal["mean", "absolute"] = "mean",
    floor_use: Literal["add", "drop"] = "add",
    normalize: Literal["none", "tensor"] = "none",
) -> Merged:
    """Average of the experts with their diagonal Fisher information as weights.

        D* = sum_t c_t F_t D_t / sum_t c_t F_t

    Entry by entry, `F_t >= 0` the diagonal Fisher of expert t: an expert counts where its predictions depend on the
    entry. Equal to averaging the weights themselves, because the coefficients of an entry sum to 1. Entries without any
    Fisher take the mean of the experts weighted by their floors (`floor_use="add"`).

    Args:
        weights: `c`, one per expert, all 1 unless given. To put whole models on one scale give `1 / |F_t|` here.
        floor: size of the floor under the Fisher.
        floor_unit: "mean" takes `floor` times the mean Fisher of that expert's tensor, so that the answer does not
            depend on the units of the loss; "absolute" takes `floor` as it is.
        floor_use: "add" adds it to every entry; "drop" keeps the base where the summed Fisher is not above it.
        normalize: "tensor" divides each expert's Fisher by its Euclidean norm over this tensor (plus the floor).

    Source:
        M. Matena, C. Raffel, "Merging models with Fisher-weighted averaging", NeurIPS 2022, arXiv:2111.09832.
    """
    share = [1.0] * len(deltas) if weights is None else list(weights)
    top: Tensor | None = None
    threshold = floor if floor_unit == "absolute" else 0.0
    for delta, fisher, share_of_expert in zip(deltas, statistics["fisher"], share, strict=True):
        weight = share_of_expert
        own_floor = floor if floor_unit == "absolute" else floor * float(fisher.mean())
        if normalize == "tensor":
            weight = weight / (float(torch.linalg.vector_norm(fisher)) + own_floor + _NOWHERE)
        precision = fisher.to(delta.dtype, copy=True)
        if floor_use == "add":
            precision.add_(own_floor + _NOWHERE)
        precision.mul_(weight)
        if floor_unit == "mean":
            threshold += weight * own_floor
        if top is None:
            top, bottom = precision * delta, precision
        else:
            top.addcmul_(precision, delta)
            bottom.add_(precision)
    assert top is not None, "a merge has at least one expert"
    if floor_use == "add":
        return Merged(top.div_(bottom))
    is_measured = bottom > threshold
    value = torch.where(is_measured, top / bottom.where(is_measured, 1.0), 0.0)
    return Merged(value, {"entries_dropped": int(is_measured.numel() - is_measured.count_nonzero())})


FISHER = MergeMethod(
    "fisher",
    merge,
    "tensor",
    laws=frozenset({"single", "identical", "homogeneous", "odd", "zeros"}),
    access=Access(one_pass=True),
    cost=MethodCost(workspace=lambda shape, n_experts, options: 5 * math.prod(shape)),
    needs_statistics=("fisher",),
)
