"""How much of a delta survives storage: reinforcement learning moves weights by little, and bfloat16 is coarse.

A weight `w` stored in bfloat16 has neighbours one ulp away, `2^-8` to `2^-7` of its size; a change below half an ulp is
mostly rounded away. Experts that were trained in float32 and stored in bfloat16 have lost those changes for good.

Shapes: any, all tensors of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Survival", "half_ulp", "survival"]


@dataclass(frozen=True, slots=True)
class Survival:
    """What of the change of all weights survives.

    Args:
        changed: share of weights that differ in the precision of training.
        survives: share of all weights whose stored values differ.
        above_half_ulp: share of all weights that changed by at least half an ulp of the base's stored value.
        relative_change: `||W_t - W_0||_F / ||W_0||_F` in the precision of training.
        energy: `||stored W_t - stored W_0||_F / ||W_t - W_0||_F`; above 1 where rounding amplifies.
        error: `||(stored W_t - stored W_0) - (W_t - W_0)||_F / ||W_t - W_0||_F`: rounding noise against the delta.
    """

    changed: float
    survives: float
    above_half_ulp: float
    relative_change: float
    energy: float
    error: float


def half_ulp(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Half the distance of the stored `|weight|` to the next larger number of that dtype, in float64."""
    stored = weight.to(dtype).double().abs()
    smallest = torch.finfo(dtype).tiny
    _, exponent = torch.frexp(stored.clamp_min(smallest))
    return torch.ldexp(torch.full_like(stored, torch.finfo(dtype).eps / 4), exponent)


def survival(base: Mapping[str, Tensor], expert: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> Survival:
    """Compare two sets of weights before and after storage in `dtype`, over all tensors together."""
    n = changed = survives = above = 0
    weight2 = delta2 = stored2 = error2 = 0.0
    for name, before in base.items():
        after = expert[name]
        delta = after.double() - before.double()
        stored = after.to(dtype).double() - before.to(dtype).double()
        n += delta.numel()
        changed += int((delta != 0).sum())
        survives += int((stored != 0).sum())
        above += int((delta.abs() >= half_ulp(before, dtype)).sum())
        weight2 += float(before.double().square().sum())
        delta2 += float(delta.square().sum())
        stored2 += float(stored.square().sum())
        error2 += float((stored - delta).square().sum())
    norm = delta2**0.5
    return Survival(
        changed / n,
        survives / n,
        above / n,
        norm / weight2**0.5,
        stored2**0.5 / norm if norm else 0.0,
        error2**0.5 / norm if norm else 0.0,
    )
