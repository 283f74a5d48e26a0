"""(IA)^3: a factor per output or per input of a layer.

    W = diag(l) W_0 and b = l b_0        keys, values
    W = W_0 diag(l)                      feed-forward layers

Source: Liu et al. (https://arxiv.org/abs/2205.05638); PEFT, `tuners/ia3`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.experts.changes.base import Change, Content, Reader
from actmat.extras.adapters.groups import Group, family_keys, group_tensors


@dataclass(frozen=True)
class Scaled(Change):
    """The base's rows or columns times (factor - `unchanged`), where `unchanged` is the neutral factor."""

    count: int
    of_inputs: bool
    unchanged: float = 1.0
    is_optional: bool = False
    kind: str = "linear"
    reads_base = True

    def misfit(self, shape: tuple[int, int]) -> str:
        """See `Change`."""
        size = shape[1] if self.of_inputs else shape[0]
        of_channels = self.of_inputs and self.count > 0 and size % self.count == 0  # channels before a kernel
        return "" if size == self.count or of_channels else f"it has {self.count} factors"

    def rows(self, tensors: Mapping[str, Tensor], base_PI: Tensor, first: int, last: int) -> Tensor:
        """See `Change`."""
        change = tensors[self.stored[0]].flatten() - self.unchanged
        if self.of_inputs:
            return base_PI * change.repeat_interleave(base_PI.shape[1] // self.count)
        return base_PI * change[first:last, None]


def _read(specs: Mapping[str, TensorSpec], fields: Mapping[str, Any]) -> Content:
    groups, extras, problems = group_tensors(specs, ("ia3_l",), "(IA)^3")
    changes = []
    for group in groups:
        of_inputs = _is_feedforward(group, fields.get("feedforward_modules"))
        if of_inputs is None:
            problems.append(f"module '{group.module}': 'feedforward_modules' of the config is a pattern, and the shape "
            f"{group.shape('ia3_l')} does not show whether its factors scale inputs")  # fmt: skip
            continue
        count, stored = math.prod(group.shape("ia3_l")), (group.names["ia3_l"],)
        changes.append(Scaled(f"{group.module}.weight", stored, count, of_inputs))
        if not of_inputs:
            changes.append(Scaled(f"{group.module}.bias", stored, count, of_inputs, is_optional=True, kind="bias"))
    return Content(changes, extras, problems)


def _is_feedforward(group: Group, listed: Any) -> bool | None:
    """True if the factors scale inputs; None if unknown."""
    shape = group.shape("ia3_l")
    if len(shape) == 2 and shape != (1, 1):
        return shape[0] == 1
    if isinstance(listed, str) or not isinstance(listed or (), Sequence):
        return None
    return any(group.module == n or group.module.endswith(f".{n}") for n in map(str, listed or ()))


IA3 = Reader(
    "(IA)^3",
    lambda fields: fields.get("peft_type") == "IA3",
    _read,
    "it multiplies the base's weights",
    family_keys(("feedforward_modules",), init_ia3_weights="affects only the initial values; the base is unchanged"),
)
