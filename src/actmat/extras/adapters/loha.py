"""LoHa: the entrywise product of two low-rank matrices.

    delta = alpha / r * (W1a W1b) o (W2a W2b)                     linear layers
    W1 = sum_ij t1[i, j] w1a[i] w1b[j], likewise W2               convolutions with a core (`use_effective_conv2d`)

Source: Hyeon-Woo et al., FedPara (https://arxiv.org/abs/2108.06098); PEFT, `tuners/loha`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from actmat.experts.changes.base import Change, Reader
from actmat.extras.adapters.groups import SCALED, Group, OwnDelta, family_keys, scaled_content

ROLES = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")


class _Product(OwnDelta):
    """`stored`: w1_a, w1_b, w2_a, w2_b, and t1, t2 of a core."""

    def rows(self, tensors: Mapping[str, Tensor], base_PI: Tensor, first: int, last: int) -> Tensor:
        a1, b1, a2, b2, *cores = (tensors[n] for n in self.stored)
        if not cores:
            return (a1[first:last] @ b1) * (a2[first:last] @ b2) * self.scaling
        one, two = (
            torch.einsum("ijkl,jr,ip->prkl", t, b, a[:, first:last]).flatten(1)
            for t, a, b in zip(cores, (a1, a2), (b1, b2), strict=True)
        )
        return one * two * self.scaling


def loha_change(group: Group, target: str, scaling: float) -> Change | str:
    """The change of one module, or a problem as one sentence."""
    if problem := _problem(group):
        return problem
    has_core = "hada_t1" in group.names
    stored = tuple(group.names[r] for r in (ROLES if has_core else ROLES[:4]))
    a, b = group.shape("hada_w1_a"), group.shape("hada_w1_b")
    shape = (a[1], b[1] * math.prod(group.shape("hada_t1")[2:])) if has_core else (a[0], b[1])
    return _Product(target, stored, scaling, shape)


def _problem(group: Group) -> str:
    """One sentence if the shapes do not match, else ''."""
    has_core = "hada_t1" in group.names or "hada_t2" in group.names
    if missing := group.missing(*(ROLES if has_core else ROLES[:4])):
        return missing
    for a, b, core in (("hada_w1_a", "hada_w1_b", "hada_t1"), ("hada_w2_a", "hada_w2_b", "hada_t2")):
        left, right, middle = group.shape(a), group.shape(b), group.shape(core)
        meet = len(middle) == 4 and middle[:2] == left[:1] + right[:1] if has_core else left[1:] == right[:1]
        first = group.shape("hada_w1_a"), group.shape("hada_w1_b")[1:], group.shape("hada_t1")[2:]
        if not meet or len(left) != 2 or len(right) != 2 or (left, right[1:], middle[2:]) != first:
            return f"module '{group.module}': {a} {left}, {b} {right} {middle or ''} do not match"
    return ""


LOHA = Reader(
    "LoHa",
    lambda fields: fields.get("peft_type") == "LOHA",
    partial(scaled_content, roles=ROLES, family="LoHa", change=loha_change),
    "a Hadamard product is not low rank",
    family_keys(SCALED, "use_effective_conv2d"),
)
