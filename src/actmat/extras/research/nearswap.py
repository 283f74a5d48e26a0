"""NearSwap: follow the expert where it stays near the base, and only a fixed step towards it elsewhere.

alchemonaut, QuartetAnemoi-70B-t0.0001 (model card), 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from actmat.methods.contract import Bounds, MergeMethod
from actmat.methods.facets import About, Access, Cost, Merged


def merge(deltas: Sequence[Tensor], *, t: Annotated[float, Bounds(0, open_low=True)] = 1e-4) -> Merged:
    """`W* = W_0 + min(t / |D|, 1) D`, which is the delta clipped to `[-t, t]`.

    Args:
        t: longest step an entry may take, in units of the weights.
    """
    if len(deltas) != 1:
        raise ValueError(f"nearswap: the rule is for the base and one expert, not {len(deltas)} experts")
    return Merged(deltas[0].clamp(-t, t))


NEARSWAP = MergeMethod(
    "nearswap",
    merge,
    "elementwise",
    About(
        "One expert's delta, each entry clipped to a fixed size.",
        "D* = min(t / |D|, 1) D",
        "alchemonaut, QuartetAnemoi-70B-t0.0001, 2024",
    ),
    laws=frozenset({"odd", "zeros"}),
    access=Access(one_pass=True),
    cost=Cost("N^2"),
    max_experts=1,
)
