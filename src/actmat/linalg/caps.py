"""Caps on a merged delta, relative to the experts' own.

Shapes: `*batch O I` or any shape for the norm cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.lapack import Retries, economy_svd, only_singular_values, retry_stats

__all__ = ["cap_delta"]


def cap_delta(
    merged: Tensor,
    deltas: Sequence[Tensor],
    *,
    norm_cap: Literal["mean", "sum"] | float | None = None,
    singular_value_cap: float | None = None,
) -> tuple[Tensor, dict[str, float | str]]:
    """Clip singular values, then the Frobenius norm; returns the capped delta and what was found.

    `singular_value_cap = c`: singular values of `D*` above `c * max_t sigma_max(D_t)` are lowered to it (matrices
    only). `norm_cap`: `D*` is scaled down so that `||D*||_F` is at most the mean ("mean"), the sum ("sum") or that
    many times the mean of the experts' norms. Norms are summed in float64.

    Raises:
        NumericalError: a decomposition did not converge.
    """
    stats: dict[str, float | str] = {}
    if singular_value_cap is not None and merged.ndim >= 2:
        largest, retries = 0.0, Retries()
        for delta in deltas:
            found, new = only_singular_values(delta)
            largest, retries = max(largest, float(found[..., 0].amax())), retries + new
        limit = singular_value_cap * largest
        u, s, vh, new = economy_svd(merged)
        capped = int((s > limit).sum())
        stats.update(singular_values_capped=capped, **retry_stats(retries + new))
        if capped:
            merged = (u * s.clamp(max=limit).unsqueeze(-2)) @ vh
    if norm_cap is not None:
        norms = [frobenius_norm64(d) for d in deltas]
        mean = sum(norms) / len(norms)
        limit = sum(norms) if norm_cap == "sum" else mean if norm_cap == "mean" else float(norm_cap) * mean
        norm = frobenius_norm64(merged)
        stats["norm_before_cap"], stats["norm_cap"] = norm, limit
        if norm > limit:
            merged = merged * (limit / norm)
    return merged, stats
