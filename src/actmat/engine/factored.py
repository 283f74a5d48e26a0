"""Factored deltas of one region of a stored tensor, as logical matrices.

Shapes: `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from actmat.experts.base import Expert, Source
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.lowrank import LowRank
from actmat.planning.regions import Region

__all__ = ["region_factors"]


def region_factors(experts: Sequence[Expert], sources: Sequence[Source], region: Region) -> list[list[LowRank]]:
    """Per logical matrix of the region, the factors of every expert, float64."""
    per_expert = [_logical(e, s, region) for e, s in zip(experts, sources, strict=True)]
    return [list(group) for group in zip(*per_expert, strict=True)]


def _logical(expert: Expert, source: Source, region: Region) -> list[LowRank]:
    columns = math.prod(region.shape[1:])
    rows = region.numel // columns
    if source.kind == "formed":
        whole = expert.factors(source.name, region.shape, torch.float64)
        first, last = region.start // columns, region.stop // columns
        if whole.b_OR.ndim == 3:
            index, first = divmod(first, whole.b_OR.shape[-2])
            last = first + rows
            whole = LowRank(whole.b_OR[index], whole.a_RI[index])
        stored = LowRank(whole.b_OR[first:last], whole.a_RI)
    else:
        stored = expert.factors(source.name, (rows, columns), torch.float64)
    layout = region.layout
    if layout.role is Role.CONVOLUTION:
        return [stored]
    if layout.orientation == "IO":
        stored = LowRank(stored.a_RI.mT, stored.b_OR.mT)
    if not layout.blocks:
        return [stored]
    packed = TensorLayout(Role.FUSED_LINEAR, layout.reason, blocks=layout.blocks)
    return [LowRank(b_OR, stored.a_RI) for b_OR in packed.to_matrices(stored.b_OR)]
