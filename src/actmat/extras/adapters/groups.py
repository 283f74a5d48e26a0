"""Group the stored tensors of PEFT adapters other than LoRA by module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.keys import Keys
from actmat.experts.changes.base import Change, Content
from actmat.experts.lora.config import parse_adapter_config
from actmat.experts.lora.fields import OF_EVERY_FAMILY
from actmat.experts.lora.modules import unreadable
from actmat.experts.lora.names import PREFIX, looks_like_factor
from actmat.layout.patterns import MatchError

_IN_THE_FILE = "given by the shapes of the stored tensors"
SCALED = ("rank_pattern", "alpha_pattern", "r", "alpha")
"""Fields that `scaled_content` reads."""
IN_TRAINING = ("lora_dropout", "vera_dropout", "rank_dropout", "module_dropout", "rank_dropout_scale")


def family_keys(obeyed: Sequence[str] = (), *in_the_file: str, **irrelevant: str) -> Keys:
    """Classify a family's config fields, including the fields common to all PEFT families.

    Args:
        obeyed: fields that the reader uses.
        in_the_file: fields whose effect is in the stored tensors.
        irrelevant: field -> reason why it has no effect.
    """
    common = {
        **OF_EVERY_FAMILY,
        "target_modules": "given by the modules in the file",
        "bias": "given by the biases in the file",
        "fan_in_fan_out": "given by the base's layout",
        "init_weights": "affects only the initial values; the base is unchanged",
        **dict.fromkeys(IN_TRAINING, "affects training only"),
        **dict.fromkeys(in_the_file, _IN_THE_FILE),
    }
    of_peft = ("peft_type", "peft_version", "base_model_name_or_path", "auto_mapping")
    return Keys((*of_peft, *obeyed), {k: w for k, w in (common | irrelevant).items() if k not in obeyed})


@dataclass(frozen=True)
class Group:
    """Stored tensors of one module: role -> stored name, and their specs."""

    module: str
    names: Mapping[str, str]
    specs: Mapping[str, TensorSpec]

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of a role's tensor; empty if missing."""
        return self.specs[self.names[role]].shape if role in self.names else ()

    def missing(self, *roles: str) -> str:
        """One sentence if a required tensor is missing, else ''."""
        lacking = [r for r in roles if r not in self.names]
        has = ", ".join(self.names.values())
        return f"module '{self.module}' has no {lacking[0]} (it has {has})" if lacking else ""


def shape_misfit(expected: Sequence[int], shape: Sequence[int]) -> str:
    """Reason why a delta of shape `own` does not match a base tensor; may be empty.

    >>> shape_misfit((4, 2), (4, 2)), shape_misfit((4, 2), (2, 4))
    ('', 'its delta is 4 x 2')
    """
    return "" if tuple(expected) == tuple(shape) else f"its delta is {' x '.join(map(str, expected))}"


@dataclass(frozen=True)
class OwnDelta(Change):
    """A delta of a known shape, formed from stored tensors without the base."""

    scaling: float
    shape: tuple[int, int]
    reads_base = False

    def misfit(self, shape: tuple[int, int]) -> str:
        """See `Change`."""
        return shape_misfit(self.shape, shape)


@dataclass(frozen=True)
class Decomposed(Change):
    """Another change whose outputs are rescaled to stored norms (DoRA)."""

    change: Change
    magnitude: str
    count: int
    kind: str = "linear"
    reads_base = True

    @property
    def is_turned(self) -> bool:  # type: ignore[override]
        """See `Change`."""
        return self.change.is_turned

    def misfit(self, shape: tuple[int, int]) -> str:
        """See `Change`."""
        reason = "" if shape[0] == self.count else f"its dora_scale has {self.count} entries"
        return self.change.misfit(shape) or reason

    def rows(self, tensors: Mapping[str, Tensor], base_PI: Tensor, first: int, last: int) -> Tensor:
        """See `Change`."""
        changed_PI = base_PI + self.change.rows(tensors, base_PI, first, last)
        norms_P = torch.linalg.vector_norm(changed_PI, dim=1)
        factors_P = tensors[self.magnitude].flatten()[first:last] / torch.where(norms_P > 0, norms_P, 1)
        return factors_P[:, None] * changed_PI - base_PI


def group_tensors(
    specs: Mapping[str, TensorSpec], roles: Sequence[str], family: str
) -> tuple[list[Group], dict[str, str], list[str]]:
    """Group stored tensors by module; returns groups, fully trained tensors, and problems.

    >>> spec = TensorSpec("base_model.model.fc.hada_w1_a", (4, 2), "float32", "")
    >>> groups, _, _ = group_tensors({spec.name: spec}, ["hada_w1_a"], "LoHa")
    >>> groups[0].module, groups[0].shape("hada_w1_a")
    ('fc', (4, 2))

    Args:
        roles: name suffixes of the family's tensors; `.weight` may follow.
        family: family name for messages.
    """
    of_role = re.compile(r"(?P<module>.+?)\.(?P<role>" + "|".join(roles) + r")(?:\.weight)?")
    by_module: dict[str, dict[str, str]] = {}
    extras: dict[str, str] = {}
    problems: list[str] = []
    for name, spec in specs.items():
        bare = name.removeprefix(PREFIX)
        match = of_role.fullmatch(bare)
        if not spec.is_floating or spec.dtype.startswith("float8"):
            problems.append(unreadable(spec))
        elif match is not None:
            by_module.setdefault(match["module"], {})[match["role"]] = name
        elif looks_like_factor(bare):
            problems.append(f"tensor '{name}' does not belong to an adapter of the family {family}")
        elif not bare.endswith(".base_layer.weight"):
            extras[bare.replace(".base_layer.", ".")] = name
    groups = [Group(m, names, {n: specs[n] for n in names.values()}) for m, names in by_module.items()]
    if not groups and not extras and not problems:
        problems.append("the adapter holds no tensors")
    return groups, extras, problems


def scaled_content(
    specs: Mapping[str, TensorSpec],
    fields: Mapping[str, Any],
    *,
    roles: Sequence[str],
    family: str,
    change: Callable[[Group, str, float], Change | str],
) -> Content:
    """Content of an adapter of LoHa or LoKr: `r` and `alpha`, with their patterns, mean what they mean in LoRA.

    Args:
        change: that of a group, of a target and a scaling `alpha / r`; or a problem in one sentence.
    """
    known = {k: fields[k] for k in ("r", "rank_pattern", "alpha_pattern") if k in fields}
    config, problems = parse_adapter_config({"peft_type": "LORA", "lora_alpha": fields.get("alpha", 8), **known})
    groups, extras, scale_problems = group_tensors(specs, roles, family)
    problems += scale_problems
    changes: list[Change] = []
    for group in groups:
        try:
            made = change(group, f"{group.module}.weight", config.scaling_of(group.module))
        except MatchError as error:
            made = str(error)
        if isinstance(made, str):
            problems.append(made)
        else:
            changes.append(made)
    return Content(changes, extras, problems)
