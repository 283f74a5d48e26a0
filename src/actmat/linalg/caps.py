"""Caps on the norm of a merged delta, relative to the experts' own.

Shapes: `*batch O I` or any shape; `O` out_features, `I` in_features, `R` rank of a factor pair, `T` experts, `N`
entries of a flattened tensor, `C` entries of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.lowrank import LowRank, frobenius_norm

NormCap = Literal["mean", "sum", "average"] | float
"""The mean or the sum of the experts' norms, that many times their mean, or the norm of the experts' average."""

_CHUNK = 1 << 16
"""Entries that are widened to float64 at a time."""


def cap_delta(merged: Tensor, deltas: Sequence[Tensor], norm_cap: NormCap) -> tuple[Tensor, dict[str, float]]:
    """Scale the merged delta down to the cap; returns it with its record.

    `||D*||_F` is at most the mean ("mean"), the sum ("sum") or that many times the mean of the experts' norms, or the
    norm of their average, `||sum_t D_t / T||_F` ("average"). Norms are summed in float64.
    """
    limit = _norm_of_average(deltas) if norm_cap == "average" else _limit(map(frobenius_norm64, deltas), norm_cap)
    norm = frobenius_norm64(merged)
    capped = merged * (limit / norm) if norm > limit else merged
    return capped, {"norm_before_cap": norm, "norm_cap": limit}


def cap_lowrank(merged: LowRank, deltas: Sequence[LowRank], norm_cap: NormCap) -> tuple[LowRank, dict[str, float]]:
    """The same cap on factors, exact, as a factor of `b`. Cost `O((O + I) R^2 + R^3)` for each pair."""
    if norm_cap == "average":
        every = LowRank(torch.cat([d.b_OR for d in deltas], -1), torch.cat([d.a_RI for d in deltas], -2))
        limit = frobenius_norm(every) / len(deltas)
    else:
        limit = _limit(map(frobenius_norm, deltas), norm_cap)
    norm = frobenius_norm(merged)
    capped = LowRank(merged.b_OR * (limit / norm), merged.a_RI) if norm > limit else merged
    return capped, {"norm_before_cap": norm, "norm_cap": limit}


def _norm_of_average(deltas: Sequence[Tensor]) -> float:
    """`||sum_t D_t / T||_F`, summed in float64 without a float64 copy of a whole delta."""
    flats_TN = [delta.reshape(-1) for delta in deltas]
    squares = 0.0
    for start in range(0, flats_TN[0].numel(), _CHUNK):
        sum_C = flats_TN[0][start : start + _CHUNK].to(torch.float64, copy=True)
        for flat_N in flats_TN[1:]:
            sum_C += flat_N[start : start + _CHUNK]
        squares += float(sum_C @ sum_C)
    return math.sqrt(squares) / len(deltas)


def _limit(norms: Iterable[float], cap: Literal["mean", "sum"] | float) -> float:
    norms = list(norms)
    mean = sum(norms) / len(norms)
    return sum(norms) if cap == "sum" else mean if cap == "mean" else cap * mean
