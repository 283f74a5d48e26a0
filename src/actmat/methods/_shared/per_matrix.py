"""Methods written for one matrix, applied to every matrix of a batch and to the cores of low-rank deltas.

Shapes: `T` experts, `O` out_features, `I` in_features; any leading batch axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actmat.linalg.lapack import Retries, retry_stats
from actmat.linalg.lowrank import CommonBases, LowRank, common_bases
from actmat.linalg.svd import MatrixForm
from actmat.methods.facets import LowRankForm, Merged, MergedLowRank

KnownShape = Sequence[int] | None
"""Shape of a layer's matrix if the deltas are its cores; None if they are complete."""

MatrixStats = dict[str, float | int | str | bool]


@dataclass(frozen=True, slots=True)
class OneMatrix:
    """The merged delta of one matrix, numbers for its record, and retries of decompositions.

    Over a batch, numbers whose names end in `_min` or `_max` give the smallest or largest, others add up.
    """

    value_OI: Tensor
    numbers: Mapping[str, float | int] = field(default_factory=dict)
    retries: Retries = ()


def each_matrix(
    rule: Callable[[Sequence[Any]], OneMatrix], tensors: Sequence[MatrixForm]
) -> tuple[Tensor, MatrixStats]:
    """`rule` of every `O x I` matrix of the batch, as a list with one of each tensor, and one record of all.

    >>> each_matrix(lambda ds: OneMatrix(ds[0] + ds[1], {"n": 1}), [torch.ones(2, 1, 1)] * 2)[1]
    {'n': 2}
    """
    first = tensors[0]
    matrices = ([t] if isinstance(t, LowRank) else t.reshape(-1, *t.shape[-2:]) for t in tensors)
    merged = [rule(items) for items in zip(*matrices, strict=True)]
    if not merged:
        return torch.zeros(first.shape, dtype=first.dtype), {}
    values = [f.value_OI for f in merged]
    value = values[0] if len(values) == 1 else torch.stack(values)
    return value.reshape(first.shape[:-2] + values[0].shape), _record(merged)


def _record(merged: Sequence[OneMatrix]) -> MatrixStats:
    out: MatrixStats = {}
    for name in merged[0].numbers:
        values = [f.numbers[name] for f in merged]
        out[name] = min(values) if name.endswith("_min") else max(values) if name.endswith("_max") else sum(values)
    return {**out, **retry_stats(name for f in merged for name in f.retries)}


def in_cores(
    merge: Callable[..., Merged],
    refused: tuple[str, Any, str] | None = None,
    *,
    factored: bool = False,
    site_of: Callable[[Sequence[LowRank]], tuple[CommonBases, Any]] | None = None,
) -> LowRankForm:
    """The exact low-rank form of a method that commutes with rotations of rows and columns: a merge of small cores.

    Args:
        merge: `(deltas, site=None, *, <needs>, <options>)`. Called with float64 cores of the common bases; `site` is
            information about the layer that the cores lack; by default, the shape of its matrix.
        refused: option, value, and the reason why that value has no low-rank form.
        factored: the merge begins with decompositions (`thin_svd`), and takes cores of one matrix as their factors.
        site_of: `(deltas) -> (bases, site)`; the last cores of the bases may be of other matrices.
    """

    @functools.wraps(merge, assigned=())
    def merge_lowrank(deltas: Sequence[LowRank], **arguments: Any) -> MergedLowRank:
        """The same merge on the cores of the common bases; sizes come from the full shape. Exact, in float64."""
        if refused is not None and arguments.get(refused[0]) == refused[1]:
            raise ValueError(refused[2])
        bases, site = (common_bases(deltas), deltas[0].shape) if site_of is None else site_of(deltas)
        cores = bases.cores if factored and deltas[0].b_OR.dim() == 2 else bases.cores_PQ
        merged = merge(cores[: len(deltas)], site, **arguments)
        return MergedLowRank(bases.lift(merged.value).to(deltas[0].b_OR.dtype), merged.stats)

    def why_not(options: Mapping[str, Any], n_experts: int, weights: Sequence[float] | None) -> str | None:
        return refused[2] if refused is not None and options[refused[0]] == refused[1] else None

    return LowRankForm(merge_lowrank, why_not=why_not)
