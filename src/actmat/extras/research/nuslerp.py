"""Method `nuslerp`.

Shapes: `L` entries of one vector that has an angle of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from actmat.methods._shared.per_expert import given_base
from actmat.methods.contract import MergeMethod, Weights
from actmat.methods.facets import Access, Merged, MethodCost

SMALLEST_SUM = 1e-6
"""Sum of the weights below which the middle is taken."""
_PARALLEL = 1e-8
"""Sine of an angle below which two vectors count as parallel."""


def merge(
    deltas: Sequence[Tensor],
    *,
    weights: Weights = None,
    base: Tensor | None = None,
    of: Literal["deltas", "weights"] = "deltas",
    along: Literal["tensor", "rows", "columns"] = "tensor",
) -> Merged:
    """Spherical interpolation of two experts' deltas or weights; of the whole tensor, its rows or its columns.

        D* = [sin((1-t) a) D_1 + sin(t a) D_2] / sin(a),   t = w_2 / (w_1 + w_2),
        a: angle between D_1 and D_2

    Parallel and opposite vectors are interpolated linearly, and a zero vector is at a right angle to all. A delta that
    is alone is the result. float64 inside. `slerp` is the usual form.

    Args:
        of: `D* = X` from the deltas; "weights": `D* = X - W_0` from `W_t = W_0 + D_t`.
        along: one angle for the whole tensor, one for each row (along the last axis), or one for each column (along
            the first).

    Source:
        C. Goddard, mergekit, 2024.
    """
    if len(deltas) > 2:
        raise ValueError(f"nuslerp: a path has two ends, not {len(deltas)}")
    if len(deltas) == 1:
        return Merged(deltas[0].clone())
    shares = [1.0, 1.0] if weights is None else list(weights)
    t = shares[1] / sum(shares) if abs(sum(shares)) > SMALLEST_SUM else 0.5
    ends = [d.to(torch.float64) for d in deltas]
    if of == "weights":
        wide = given_base("nuslerp", base).to(torch.float64)
        ends = [wide + end for end in ends]
    value = _between(_vectors(ends[0], along), _vectors(ends[1], along), t)
    value = value.movedim(-1, 0) if along == "columns" else value.reshape(ends[0].shape)
    if of == "weights":
        value = value - wide
    return Merged(value.to(deltas[0].dtype), {"t": t})


def _vectors(tensor: Tensor, along: str) -> Tensor:
    """The vectors that have an angle of their own, along the last axis."""
    if along == "tensor" or tensor.ndim < 2:
        return tensor.reshape(1, -1) if along != "columns" else tensor
    return tensor if along == "rows" else tensor.movedim(0, -1)


def _between(first_L: Tensor, second_L: Tensor, t: float) -> Tensor:
    norms = [torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (first_L, second_L)]
    units = [x / torch.where(n > 0, n, 1.0) for x, n in zip((first_L, second_L), norms, strict=True)]
    angle = (units[0] * units[1]).sum(-1, keepdim=True).clamp(-1, 1).acos()
    sine = angle.sin()
    parallel = sine.abs() < _PARALLEL
    safe = torch.where(parallel, 1.0, sine)
    shares = [torch.where(parallel, k, (k * angle).sin() / safe) for k in (1 - t, t)]
    return first_L * shares[0] + second_L * shares[1]


NUSLERP = MergeMethod(
    "nuslerp",
    merge,
    "tensor",
    laws=frozenset({"homogeneous", "odd", "identical", "left_orthogonal", "right_orthogonal", "permutation", "zeros"}),
    access=Access(base=lambda options: bool(options["of"] == "weights")),
    cost=MethodCost(workspace=lambda shape, n_experts, options: 18 * math.prod(shape)),
    max_experts=2,
)
