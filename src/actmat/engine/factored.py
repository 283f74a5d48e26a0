"""Factored deltas of one part of a stored tensor, as logical matrices.

Shapes: `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from actmat.experts.base import Expert, Source
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.lowrank import LowRank
from actmat.plan.parts import Part

__all__ = ["part_factors"]


def part_factors(experts: Sequence[Expert], sources: Sequence[Source], part: Part) -> list[list[LowRank]]:
    """Per logical matrix of the part, the factors of every expert, float64."""
    per_expert = [_logical(e, s, part) for e, s in zip(experts, sources, strict=True)]
    return [list(group) for group in zip(*per_expert, strict=True)]


def _logical(expert: Expert, source: Source, part: Part) -> list[LowRank]:
    columns = math.prod(part.shape[1:])
    rows = part.numel // columns
    if source.kind == "formed":
        whole = expert.factors(source.name, part.shape, torch.float64)
        first, last = part.start // columns, part.stop // columns
        if whole.b_OR.ndim == 3:
            index, first = divmod(first, whole.b_OR.shape[-2])
            last = first + rows
            whole = LowRank(whole.b_OR[index], whole.a_RI[index])
        stored = LowRank(whole.b_OR[first:last], whole.a_RI)
    else:
        stored = expert.factors(source.name, (rows, columns), torch.float64)
    layout = part.layout
    if layout.role is Role.CONVOLUTION:
        return [stored]
    if layout.orientation == "IO":
        stored = LowRank(stored.a_RI.mT, stored.b_OR.mT)
    if not layout.blocks:
        return [stored]
    packed = TensorLayout(Role.FUSED_LINEAR, layout.reason, blocks=layout.blocks)
    return [LowRank(b_OR, stored.a_RI) for b_OR in packed.to_matrices(stored.b_OR)]
