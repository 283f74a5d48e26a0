"""Caps on a merged delta, relative to the experts' own.

Shapes: `*batch O I` or any shape for the norm cap; `O` out_features, `I` in_features, `R` rank of a factor pair, `K`
singular values, `P`, `Q` sides of a core, `T` experts, `N` entries of a flattened tensor, `C` entries of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.lapack import Retries, economy_svd, only_singular_values, retry_stats
from actmat.linalg.lowrank import LowRank, frobenius_norm, orthogonal_core

NormCap = Literal["mean", "sum", "average"] | float
"""The mean or the sum of the experts' norms, that many times their mean, or the norm of the experts' average."""

_CHUNK = 1 << 16
"""Entries that are widened to float64 at a time."""


def cap_delta(
    merged: Tensor,
    deltas: Sequence[Tensor],
    *,
    norm_cap: NormCap | None = None,
    singular_value_cap: float | None = None,
) -> tuple[Tensor, dict[str, float | str]]:
    """Clip singular values, then the Frobenius norm; returns the capped delta and its record.

    `singular_value_cap = c`: singular values of `D*` above `c * max_t sigma_max(D_t)` are lowered to it (matrices
    only). `norm_cap`: `D*` is scaled down so that `||D*||_F` is at most the mean ("mean"), the sum ("sum") or that
    many times the mean of the experts' norms, or the norm of their average, `||sum_t D_t / T||_F` ("average"). Norms
    are summed in float64.

    Raises:
        NumericalError: a decomposition did not converge.
    """
    stats: dict[str, float | str] = {}
    if singular_value_cap is not None and merged.ndim >= 2:
        largest, retries = _largest_singular_value(deltas)
        limit = singular_value_cap * largest
        u, s, vh, new = economy_svd(merged)
        capped = int((s > limit).sum())
        stats.update(singular_values_capped=capped, **retry_stats(retries + new))
        if capped:
            merged = (u * s.clamp(max=limit).unsqueeze(-2)) @ vh
    if norm_cap is not None:
        limit = _norm_of_average(deltas) if norm_cap == "average" else _limit(map(frobenius_norm64, deltas), norm_cap)
        norm = frobenius_norm64(merged)
        stats.update(norm_before_cap=norm, norm_cap=limit)
        if norm > limit:
            merged = merged * (limit / norm)
    return merged, stats


def cap_lowrank(
    merged: LowRank,
    deltas: Sequence[LowRank],
    *,
    norm_cap: NormCap | None = None,
    singular_value_cap: float | None = None,
) -> tuple[LowRank, dict[str, float | str]]:
    """The same caps on factors, exact: a core `P x Q` has the singular values and the norm of its `O x I` matrix.

    With a cap on singular values the result is `b = Q_b U min(s, c)`, `a = (Q_a V)^T` of rank `min(P, Q)`, capped or
    not; a cap on the norm is a factor of `b`. float64 inside. Cost `O((O + I) R^2 + R^3)` for each pair.
    """
    stats: dict[str, float | str] = {}
    if singular_value_cap is not None:
        largest, retries = _largest_singular_value(orthogonal_core(delta)[0] for delta in deltas)
        limit = singular_value_cap * largest
        core_PQ, left_OP, right_IQ = orthogonal_core(merged)
        u, s, vh, new = economy_svd(core_PQ)
        stats.update(singular_values_capped=int((s > limit).sum()), **retry_stats(retries + new))
        b_OR = left_OP @ (u * s.clamp(max=limit).unsqueeze(-2))
        merged = LowRank(b_OR, vh @ right_IQ.mT).to(merged.b_OR.dtype)
    if norm_cap is not None:
        if norm_cap == "average":
            every = LowRank(torch.cat([d.b_OR for d in deltas], -1), torch.cat([d.a_RI for d in deltas], -2))
            limit = frobenius_norm(every) / len(deltas)
        else:
            limit = _limit(map(frobenius_norm, deltas), norm_cap)
        norm = frobenius_norm(merged)
        stats.update(norm_before_cap=norm, norm_cap=limit)
        if norm > limit:
            merged = LowRank(merged.b_OR * (limit / norm), merged.a_RI)
    return merged, stats


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


def _largest_singular_value(matrices: Iterable[Tensor]) -> tuple[float, Retries]:
    largest, retries = 0.0, Retries()
    for matrix in matrices:
        found, new = only_singular_values(matrix)
        largest, retries = max(largest, float(found[..., 0].amax())), retries + new
    return largest, retries
