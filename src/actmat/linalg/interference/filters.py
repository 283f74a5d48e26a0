"""Spectral filters: the weight of each eigendirection of `S` in the merged delta.

With `S = V diag(l) V^T`, a filter gives `f(l)` in [0, 1]; the solver needs the gain `g = f(l) / l`.

Shapes: `N` eigenvalues (ascending), `K` of them kept (the largest).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["FLOAT32_EPS", "Filter", "FilterKind", "Gain", "gain"]

FLOAT32_EPS = 2.0**-23
"""eps of float32: the unit of the default cut-off, whatever the compute dtype."""

FilterKind = Literal["hard", "tikhonov", "exponential", "adaptive"]


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter and its parameter.

    Args:
        kind: hard         f = 1 where l > rtol l_max, else 0
              tikhonov     f = l / (l + ridge m), m = tr(S) / I the mean eigenvalue
              exponential  f = 1 - exp(-l t): gradient flow stopped at time t
              adaptive     hard, and at most the `ceil((sum sqrt(l))^2 / sum(l))` largest
        rtol: relative cut-off in units of the eigenvalues of `S`; None means `I eps(float32)`.
        ridge: relative ridge, in units of the mean eigenvalue.
        time: in units of 1 / m, or of 1 when `time_is_absolute` (eigenvalues of a normalised `S` have a scale).
    """

    kind: FilterKind = "hard"
    rtol: float | None = None
    ridge: float = 0.1
    time: float = 10.0
    time_is_absolute: bool = False

    def resolved_rtol(self, size: int, width: int, dtype: torch.dtype) -> float:
        """The relative cut-off in force for an `N x N` matrix (`size`) of a layer with `I = width` inputs.

        Never below the rounding of the matrix itself, `min(N, I) eps(dtype)`: below that, eigenvalues are noise.
        """
        wanted = width * FLOAT32_EPS if self.rtol is None else self.rtol
        return max(wanted, min(size, width) * torch.finfo(dtype).eps)


@dataclass(frozen=True, slots=True)
class Gain:
    """`g = f(l) / l` of the `K` largest eigenvalues; the others have none. `stats` are recorded."""

    gain_K: Tensor
    stats: dict[str, float | int]


def gain(values_N: Tensor, spectral: Filter, *, rtol: float, mean: float) -> Gain:
    """Evaluate a filter on a spectrum.

    Args:
        values_N: eigenvalues, ascending; rounding may have made the smallest negative.
        spectral: the filter.
        rtol: relative cut-off in force, see `Filter.resolved_rtol`.
        mean: mean eigenvalue of `S`, `tr(S) / I`.

    >>> found = gain(torch.tensor([0.0, 1.0, 4.0]), Filter(), rtol=1e-6, mean=5 / 3)
    >>> found.gain_K.tolist(), found.stats["rank"]
    ([1.0, 0.25], 2)
    """
    if spectral.kind == "tikhonov":
        ridge = spectral.ridge * mean
        return Gain(1.0 / (values_N.clamp_min(0) + ridge), {"ridge": ridge})
    if spectral.kind == "exponential":
        time = spectral.time if spectral.time_is_absolute else spectral.time / mean
        exponent = values_N.clamp_min(0) * time
        # (1 - exp(-l t)) / l -> t as l -> 0
        ratio = torch.where(
            exponent > 0, -torch.expm1(-exponent) / exponent.clamp_min(torch.finfo(exponent.dtype).tiny), 1.0
        )
        return Gain(ratio * time, {"time": time})
    cutoff = rtol * float(values_N[-1])
    kept = int((values_N > cutoff).sum())
    if spectral.kind == "adaptive" and kept:
        positive = values_N[values_N.numel() - kept :].double()
        participation = float(positive.sqrt().sum() ** 2 / positive.sum())
        # minus one part in 1e9 before the ceiling: equal eigenvalues give an integer, up to rounding
        kept = min(kept, math.ceil(participation * (1 - 1e-9)))
    largest = values_N[values_N.numel() - kept :]
    return Gain(1.0 / largest, {"rank": kept, "cutoff": cutoff, "rtol": rtol})
