"""How far two outputs are apart, tensor by tensor, read in pieces.

    distance = ||D_1 - D_2||_F        relative = distance / ((||D_1||_F + ||D_2||_F) / 2)
    cosine = <D_1, D_2> / (||D_1||_F ||D_2||_F)

`D_1`, `D_2` are the merged deltas as they are stored: written weights minus the base. Everything is summed in float64.
`relative` lies in [0, 2]: 2 where the deltas point in opposite directions, or one of them is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint, torch_dtype
from actmat.experts.lora.adapter import Adapter
from actmat.linalg.lowrank import LowRank, frobenius_norm, weighted_sum
from actmat.plan.choose import depth_of

__all__ = ["TensorDifference", "action_of", "compare_modules", "compare_stored"]

PIECE = 1 << 20
"""Entries of a tensor that are in memory at once, times three inputs: about 50 MB at most."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor (of adapters, one module) of both outputs.

    Args:
        name, shape: of the tensor.
        actions: what was done to it in each merge, with the rule's name where one was used.
        same: both stored the same bytes; the deltas were not read then.
        distance: see the module; 0 for the same bytes.
        norms: of the merged deltas; None where the base was not read.
        relative, cosine: see the module; None where a norm is not known, or where both are 0.
    """

    name: str
    shape: tuple[int, ...]
    actions: tuple[str, str]
    same: bool
    distance: float
    norms: tuple[float, float] | None = None
    relative: float | None = None
    cosine: float | None = None

    @property
    def depth(self) -> int | None:
        """Number of its layer, if its name has one."""
        return depth_of(self.name)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "actions": list(self.actions),
            "same": self.same,
            "distance": self.distance,
            "norms": None if self.norms is None else list(self.norms),
            "relative": self.relative,
            "cosine": self.cosine,
        }


@dataclass(slots=True)
class _Sums:
    """Sums of squares and products of `W_1 - W_2`, `D_1`, `D_2` over the pieces so far."""

    apart: float = 0.0
    first: float = 0.0
    second: float = 0.0
    inner: float = 0.0


def compare_stored(
    first: Checkpoint, second: Checkpoint, base: Checkpoint | None, name: str, actions: tuple[str, str], *, same: bool
) -> TensorDifference:
    """The difference of one stored tensor, of any two dtypes; without the base only its distance.

    Args:
        base: holds the tensor under the same name, if given.
        same: the manifests say that the bytes agree; nothing is read then.
    """
    shape = first.specs[name].shape
    if same:
        return TensorDifference(name, shape, actions, True, 0.0)
    sums = _Sums()
    for start in range(0, first.specs[name].numel, PIECE):
        w_first, w_second = (_piece(c, name, start) for c in (first, second))
        sums.apart += _square(w_first - w_second)
        if base is not None:
            w_base = _piece(base, name, start)
            d_first, d_second = w_first - w_base, w_second - w_base
            sums.first += _square(d_first)
            sums.second += _square(d_second)
            sums.inner += float(torch.dot(d_first, d_second))
    if base is None:
        return TensorDifference(name, shape, actions, False, math.sqrt(sums.apart))
    return _difference(name, shape, actions, sums)


def _piece(checkpoint: Checkpoint, name: str, start: int) -> Tensor:
    """Up to `PIECE` entries from entry `start` on, as float64."""
    spec = checkpoint.specs[name]
    count = min(PIECE, spec.numel - start)
    buffer = bytearray(count * spec.itemsize)
    checkpoint.read_into(name, start * spec.itemsize, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=torch_dtype(spec.dtype)).double()


def _square(values: Tensor) -> float:
    return float(torch.dot(values, values))


def compare_modules(first: Adapter, second: Adapter, name: str, actions: tuple[str, str]) -> TensorDifference:
    """The difference of one module of two adapters, from its factors, exactly: no delta is formed."""
    modules = first.modules[name], second.modules[name]
    deltas = [a.factors(m, torch.float64) for a, m in zip((first, second), modules, strict=True)]
    norms = [frobenius_norm(d) for d in deltas]
    sums = _Sums(
        apart=frobenius_norm(weighted_sum(deltas, (1.0, -1.0))) ** 2,
        first=norms[0] ** 2,
        second=norms[1] ** 2,
        inner=_inner(*deltas),
    )
    return _difference(name, modules[0].shape, actions, sums)


def _inner(x: LowRank, y: LowRank) -> float:
    """`<b_x a_x, b_y a_y> = sum (b_x^T b_y) * (a_x a_y^T)`, over batches too."""
    return float(((x.b_OR.mT @ y.b_OR) * (x.a_RI @ y.a_RI.mT)).sum())


def _difference(name: str, shape: tuple[int, ...], actions: tuple[str, str], sums: _Sums) -> TensorDifference:
    distance, norms = math.sqrt(sums.apart), (math.sqrt(sums.first), math.sqrt(sums.second))
    product = norms[0] * norms[1]
    return TensorDifference(
        name,
        shape,
        actions,
        same=distance == 0,
        distance=distance,
        norms=norms,
        relative=2 * distance / sum(norms) if sum(norms) else None,
        cosine=max(-1.0, min(1.0, sums.inner / product)) if product else None,
    )


def action_of(row: Mapping[str, Any]) -> str:
    """`actmat`, `average`, `copy` or `tie`: the rule's name where one was used."""
    return str(row["method"]) if row["action"] == "merge" else str(row["action"])
