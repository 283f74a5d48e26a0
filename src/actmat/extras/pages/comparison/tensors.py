"""Distance of two outputs, tensor by tensor, read in chunks or from factors.

    distance = ||D_1 - D_2||_F        relative = distance / ((||D_1||_F + ||D_2||_F) / 2)
    cosine = <D_1, D_2> / (||D_1||_F ||D_2||_F)

`D_1`, `D_2` are the merged deltas as they are stored: written weights minus the base. Everything is summed in float64.
`relative` lies in [0, 2]: 2 where the deltas point in opposite directions, or one of them is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint, torch_dtype
from actmat.extras.pages.comparison.model import TensorDifference
from actmat.linalg.lowrank import LowRank, frobenius_norm, weighted_sum

__all__ = ["Sums", "difference", "factored_sums", "stored_sums"]

CHUNK = 1 << 20
"""Entries of a tensor that are in memory at once, times three inputs: about 50 MB at most."""


@dataclass(slots=True)
class Sums:
    """Sums of squares and products of `D_1 - D_2`, `D_1`, `D_2`; those of single deltas are None without a base."""

    apart: float
    first: float | None = None
    second: float | None = None
    inner: float = 0.0


def stored_sums(first: Checkpoint, second: Checkpoint, base: Checkpoint | None, name: str) -> Sums:
    """Sums over a stored tensor of any two dtypes; `base` holds it under the same name."""
    apart = norm_first = norm_second = inner = 0.0
    for start in range(0, first.specs[name].numel, CHUNK):
        w_first, w_second = (_chunk(c, name, start) for c in (first, second))
        apart += _square(w_first - w_second)
        if base is not None:
            w_base = _chunk(base, name, start)
            d_first, d_second = w_first - w_base, w_second - w_base
            norm_first += _square(d_first)
            norm_second += _square(d_second)
            inner += float(torch.dot(d_first, d_second))
    return Sums(apart) if base is None else Sums(apart, norm_first, norm_second, inner)


def factored_sums(first: LowRank, second: LowRank) -> Sums:
    """Sums over two factored deltas, exactly; no delta is formed.

    >>> x = LowRank(torch.ones(2, 1), torch.ones(1, 3))
    >>> sums = factored_sums(x, LowRank(-x.b_OR, x.a_RI))
    >>> round(sums.apart, 6), round(sums.inner, 6)
    (24.0, -6.0)
    """
    if torch.equal(first.b_OR, second.b_OR) and torch.equal(first.a_RI, second.a_RI):
        square = frobenius_norm(first) ** 2
        return Sums(0.0, square, square, square)  # without the rounding of a difference
    # <b_1 a_1, b_2 a_2> = sum (b_1^T b_2) * (a_1 a_2^T), over batches too
    inner = float(((first.b_OR.mT @ second.b_OR) * (first.a_RI @ second.a_RI.mT)).sum())
    apart = frobenius_norm(weighted_sum((first, second), (1.0, -1.0)))
    return Sums(apart**2, frobenius_norm(first) ** 2, frobenius_norm(second) ** 2, inner)


def difference(
    name: str,
    shape: tuple[int, ...],
    actions: tuple[str, str],
    sums: Sums,
    dtypes: tuple[str, str] | None = None,
) -> TensorDifference:
    """The difference of two tensors from their sums; without norms only the distance.

    >>> difference("w", (2,), ("a", "b"), Sums(4.0, 1.0, 1.0, -1.0)).relative
    2.0

    Args:
        name, shape, actions: of the tensor.
        sums: over its entries.
        dtypes: in which it is stored, where these differ: then it is not the same at any distance.
    """
    distance = math.sqrt(sums.apart)
    same = distance == 0 and dtypes is None
    if sums.first is None or sums.second is None:
        return TensorDifference(name, shape, actions, same=same, distance=distance, dtypes=dtypes)
    norms = math.sqrt(sums.first), math.sqrt(sums.second)
    product = norms[0] * norms[1]
    return TensorDifference(
        name,
        shape,
        actions,
        same=same,
        distance=distance,
        norms=norms,
        relative=2 * distance / sum(norms) if sum(norms) else None,
        cosine=max(-1.0, min(1.0, sums.inner / product)) if product else None,
        dtypes=dtypes,
    )


def _chunk(checkpoint: Checkpoint, name: str, start: int) -> Tensor:
    """Up to `CHUNK` entries from entry `start` on, as float64."""
    spec = checkpoint.specs[name]
    count = min(CHUNK, spec.numel - start)
    buffer = bytearray(count * spec.itemsize)
    checkpoint.read_into(name, start * spec.itemsize, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=torch_dtype(spec.dtype)).double()


def _square(values: Tensor) -> float:
    return float(torch.dot(values, values))
