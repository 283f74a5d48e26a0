"""AdaLoRA: a product of two factors with a trained scale per direction.

    delta = alpha / (r + 1e-5) * B diag(E) A

`r` is the initial rank or, if directions were removed during training (`rank_pattern`), the stored rank. The division
and the 1e-5 are PEFT's.

Source: Zhang et al. (https://arxiv.org/abs/2303.10512); PEFT, `tuners/adalora`.

Shapes: `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.keys import Keys
from actmat.experts.changes.base import Content, Reader
from actmat.experts.lora.fields import IRRELEVANT, REFUSED
from actmat.extras.adapters.groups import OwnDelta, family_keys, group_tensors
from actmat.linalg.lowrank import LowRank

ROLES = ("lora_A", "lora_B", "lora_E")
SHIFT = 1e-5
"""Constant that PEFT adds to the rank."""
_OWN = family_keys(("lora_alpha", "ensure_weight_tying"), "r", "rank_pattern")
_UNREAD = ("use_rslora", "alpha_pattern", "init_lora_weights")
_SCHEDULE = ("target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step")
KEYS = Keys(
    _OWN.obeyed,
    {
        **IRRELEVANT,
        **_OWN.irrelevant,
        **dict.fromkeys(_UNREAD, "inherited from LoRA's config; PEFT does not read it"),
        **dict.fromkeys(_SCHEDULE, "schedule of removing directions in training"),
    },
    {**REFUSED, "target_parameters": "stacked experts are supported for plain LoRA only"},
)


@dataclass(frozen=True)
class _Scaled(OwnDelta):
    rank: int  # `stored`: A, B, E

    def factors(self, tensors: Mapping[str, Tensor], base_OI: Tensor, shape: tuple[int, int]) -> LowRank:
        a_RI, b_OR, e_R1 = (tensors[n] for n in self.stored)
        return LowRank(b_OR * (e_R1.flatten() * self.scaling), a_RI)


def _read(specs: Mapping[str, TensorSpec], fields: Mapping[str, Any]) -> Content:
    groups, extras, problems = group_tensors(specs, ROLES, "AdaLoRA")
    alpha = fields.get("lora_alpha", 8)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        problems.append(f"adapter_config.json: expected a number 'lora_alpha', found {str(alpha)[:80]!r}")
        alpha = 0
    changes = []
    for group in groups:
        if missing := group.missing(*ROLES):
            problems.append(missing)
            continue
        a, b, e = (group.shape(role) for role in ROLES)
        if len(a) != 2 or len(b) != 2 or not a[0] or a[0] != b[1] or e != (a[0], 1):
            problems.append(f"module '{group.module}': lora_A {a}, lora_B {b}, lora_E {e} do not match")
            continue
        scaling = (alpha if alpha > 0 else a[0]) / (a[0] + SHIFT)
        stored = tuple(group.names[role] for role in ROLES)
        changes.append(_Scaled(f"{group.module}.weight", stored, scaling, (b[0], a[1]), a[0]))
    return Content(changes, extras, problems)


ADALORA = Reader(
    "AdaLoRA",
    lambda fields: fields.get("peft_type") == "ADALORA",
    _read,
    "each direction has its own scale, which is folded into the delta",
    KEYS,
)
