"""Rules written for one matrix, applied to every matrix of a batch.

Shapes: `T` experts, `O` out_features, `I` in_features; any leading batch axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from actmat.linalg.lapack import Retries, retry_stats
from actmat.linalg.svd import Way, part_stats

__all__ = ["OneMatrix", "each_matrix"]

Stats = dict[str, float | int | str | bool]


@dataclass(frozen=True, slots=True)
class OneMatrix:
    """The merged delta of one matrix, numbers for its record, retries of decompositions, and which were made in part.

    Over a batch, numbers whose names end in `_min` or `_max` give the smallest or largest, others add up.
    """

    value_OI: Tensor
    numbers: Mapping[str, float | int] = field(default_factory=dict)
    retries: Retries = ()
    ways: Sequence[Way] = ()


def each_matrix(
    rule: Callable[[Sequence[Tensor], Tensor | None], OneMatrix], deltas: Sequence[Tensor], base: Tensor | None = None
) -> tuple[Tensor, Stats]:
    """`rule(deltas, base)` of every `O x I` matrix of the batch, and one record of all.

    >>> each_matrix(lambda ds, _: OneMatrix(ds[0] + ds[1], {"n": 1}), [torch.ones(2, 1, 1)] * 2)[1]
    {'n': 2}
    """
    first = deltas[0]
    if first.ndim == 2:
        found = [rule(deltas, base)]
        return found[0].value_OI, _record(found)
    rows, columns = first.shape[-2:]
    flats = [delta.reshape(-1, rows, columns) for delta in deltas]
    bases = None if base is None else base.reshape(-1, rows, columns)
    found = [rule([flat[b] for flat in flats], None if bases is None else bases[b]) for b in range(flats[0].shape[0])]
    if not found:
        return torch.zeros_like(first), {}
    return torch.stack([f.value_OI for f in found]).reshape(first.shape[:-2] + found[0].value_OI.shape), _record(found)


def _record(found: Sequence[OneMatrix]) -> Stats:
    out: Stats = {}
    for name in found[0].numbers:
        values = [f.numbers[name] for f in found]
        out[name] = min(values) if name.endswith("_min") else max(values) if name.endswith("_max") else sum(values)
    ways = part_stats(way for f in found for way in f.ways)
    return {**out, **ways, **retry_stats(name for f in found for name in f.retries)}
