"""Method `nearswap`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from actmat.methods.contract import Bounds, MergeMethod
from actmat.methods.facets import Access, Merged


def merge(deltas: Sequence[Tensor], *, t: Annotated[float, Bounds(0, open_low=True)] = 1e-4) -> Merged:
    """One expert's delta, each entry clipped to a fixed size.

        D* = min(t / |D|, 1) D

    It follows the expert exactly where it is close to the base, and takes a step of fixed size towards it elsewhere.

    Args:
        t: longest step an entry may take, in units of the weights.

    Source:
        alchemonaut, QuartetAnemoi-70B-t0.0001, model card, 2024.
    """
    if len(deltas) != 1:
        raise ValueError(f"nearswap: the rule is for the base and one expert, not {len(deltas)} experts")
    return Merged(deltas[0].clamp(-t, t))


NEARSWAP = MergeMethod(
    "nearswap",
    merge,
    "elementwise",
    laws=frozenset({"odd", "zeros"}),
    access=Access(one_pass=True),
    max_experts=1,
)
