"""Sample a few thousand entries of a tensor for the traces of quantization.

The first entries in the order of storage, at most `ENTRIES`. What an expert stored is found again by adding its delta
to the base and rounding to its dtype; that is exact for 16-bit dtypes, which are the ones that matter here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.engine.observer import ObservedMerge
from actmat.planning.model import Item

ENTRIES = 4096
"""Most entries that are sampled."""

GROUP = 64
"""Entries that share a scale in common 4-bit formats, or half of them: few values within a group are a sign of one."""


def take_sample(item: Item, merged: ObservedMerge) -> dict[str, Any]:
    """Counts in the first entries of a part; lists have one entry per expert.

    entries      number of sampled entries
    levels       different values of the expert's weights; `base_levels` of the base's
    group_levels the same within groups of `GROUP`, mean over groups; `base_group_levels`
    """
    base = merged.stored[:ENTRIES]
    deltas = [d.reshape(-1)[:ENTRIES].cpu() for d in merged.deltas]
    wide = base.to(deltas[0].dtype)
    dtypes = [torch_dtype(d) for d in item.expert_dtypes]
    half = [torch.bfloat16 if dtype.itemsize > 2 else dtype for dtype in dtypes]
    coarse = [(wide + d).to(dtype).to(h) for d, dtype, h in zip(deltas, dtypes, half, strict=True)]
    return {
        "entries": base.numel(),
        "levels": [_levels(w) for w in coarse],
        "base_levels": _levels(base.to(half[0])),
        "group_levels": [_group_levels(w) for w in coarse],
        "base_group_levels": _group_levels(base.to(half[0])),
    }


def _levels(values: Tensor) -> int:
    return int(torch.unique(values.float()).numel())


def _group_levels(values: Tensor) -> float | None:
    """Mean number of different values in a group, or None without a complete group."""
    groups = values.float()[: values.numel() // GROUP * GROUP].view(-1, GROUP)
    if not groups.numel():
        return None
    steps = groups.sort(dim=1).values.diff(dim=1) != 0
    return float(steps.sum(dim=1).double().mean()) + 1.0
