"""Powers of two that bring a problem to a size at which float32 holds its squares and cubes.

Multiplying by a power of two is exact, so a method that is homogeneous gives the same bits at any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max

SMALLEST, LARGEST = 2.0**-20, 2.0**30
"""Sizes between which nothing is scaled."""

FARTHEST = 160
"""Largest exponent: brings the whole range of float32 near 1, and the part of float64's that cubes to its middle."""


def exponent_of(size: float) -> int:
    """`k` with `size * 2^-k` near 1; 0 where the size is zero, not finite, or near enough to 1 as it is.

    >>> exponent_of(3.0), exponent_of(2.0**-40), exponent_of(0.0)
    (0, -39, 0)
    """
    if SMALLEST <= size <= LARGEST or not math.isfinite(size):
        return 0
    return max(-FARTHEST, min(FARTHEST, math.frexp(size)[1]))


def largest_entry(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude of an entry; 0 for an empty tensor."""
    return max((float(torch.linalg.vector_norm(t, math.inf)) for t in tensors if t.numel()), default=0.0)


def scaled(tensor: Tensor, exponent: float, out: Tensor | None = None) -> Tensor:
    """`tensor * 2^exponent`: the tensor itself for 0, else a new one, or `out`. Rounded once, if it underflows."""
    if exponent == 0 and out is None:
        return tensor
    half = exponent // 2  # float32 does not hold 2^160
    return torch.mul(tensor, 2.0**half, out=out).mul_(2.0 ** (exponent - half))
