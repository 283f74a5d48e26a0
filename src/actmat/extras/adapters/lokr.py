"""LoKr: a Kronecker product.

    delta = alpha / r * W1 (x) W2,      W1 = W1a W1b, W2 = W2a W2b if stored as products

Row `p` of the delta is formed from row `p // K` of `W1` and row `p mod K` of `W2`, which has `K` rows.

Source: Yeh et al., LyCORIS (https://arxiv.org/abs/2309.14859); PEFT, `tuners/lokr`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from actmat.experts.changes.base import Change, Reader
from actmat.extras.adapters.groups import SCALED, Group, OwnDelta, family_keys, scaled_content

ROLES = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")


@dataclass(frozen=True)
class _Kronecker(OwnDelta):
    roles: tuple[str, ...]  # of the stored tensors
    height: int  # rows of W2

    def rows(self, tensors: Mapping[str, Tensor], base_PI: Tensor, first: int, last: int) -> Tensor:
        factors = {role: tensors[name] for role, name in zip(self.roles, self.stored, strict=True)}
        w1 = factors["lokr_w1"] if "lokr_w1" in factors else factors["lokr_w1_a"] @ factors["lokr_w1_b"]
        if "lokr_w2" in factors:
            w2 = factors["lokr_w2"].flatten(1)
        elif "lokr_t2" in factors:
            w2 = torch.einsum(
                "ijkl,ip,jr->prkl", factors["lokr_t2"], factors["lokr_w2_a"], factors["lokr_w2_b"]
            ).flatten(1)
        else:
            w2 = factors["lokr_w2_a"] @ factors["lokr_w2_b"]
        start = first // self.height
        whole = torch.kron(w1[start : -(-last // self.height)], w2)
        return whole[first - start * self.height : last - start * self.height] * self.scaling


def lokr_change(group: Group, target: str, scaling: float) -> Change | str:
    """The change of one module, or a problem as one sentence."""
    first, second = _shape(group, "lokr_w1"), _shape(group, "lokr_w2")
    if first is None or second is None:
        has = ", ".join(f"{n} {group.specs[n].shape}" for n in group.names.values())
        return f"module '{group.module}': no Kronecker product can be formed from {has}"
    stored, roles, shape = tuple(group.names.values()), tuple(group.names), (first[0] * second[0], first[1] * second[1])
    return _Kronecker(target, stored, scaling, shape, roles, second[0])


def _shape(group: Group, role: str) -> tuple[int, int] | None:
    """Rows and columns of W1 or W2, or None if it is incomplete."""
    whole, a, b = (group.shape(role + tail) for tail in ("", "_a", "_b"))
    if role in group.names:
        return (whole[0], math.prod(whole[1:])) if len(whole) > 1 else None
    if len(a) != 2 or len(b) != 2:
        return None
    core = group.shape("lokr_t2") if role == "lokr_w2" else ()
    if core:
        return (a[1], b[1] * math.prod(core[2:])) if len(core) == 4 and core[:2] == (a[0], b[0]) else None
    return (a[0], b[1]) if a[1] == b[0] else None


LOKR = Reader(
    "LoKr",
    lambda fields: fields.get("peft_type") == "LOKR",
    partial(scaled_content, roles=ROLES, family="LoKr", change=lokr_change),
    "a Kronecker product is not low rank",
    family_keys(SCALED, "use_effective_conv2d", "decompose_both", "decompose_factor"),
)
