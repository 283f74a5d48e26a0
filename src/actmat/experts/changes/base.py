"""`Change`: the delta of one tensor of a model, formed from a few stored tensors and maybe from the base.

Shapes: `O` rows and `I` columns of the logical delta, a kernel flattened into `I`; `P` rows that are wanted.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.experts.lora.config import AdapterConfig, parse_adapter_config
from actmat.experts.lora.modules import quantised_problem
from actmat.linalg.lowrank import LowRank

_PREFIX = "base_model.model."


class Change(abc.ABC):
    """Delta of one tensor.

    Attributes:
        target: name of the tensor in the model in memory.
        stored: names of the stored tensors that it is made of.
        kind: what is changed, for `inspect`.
        rank: of a product of two factors, else 0.
        is_optional: the base may lack the tensor (a bias).
        is_turned: the base's tensor is the transpose of the delta (DoRA's tables of embeddings).
        only_straight: the base's tensor must not be the transpose.
    """

    target: str
    stored: tuple[str, ...]
    kind: str = "linear"
    rank: int = 0
    is_optional: bool = False
    is_turned: bool = False
    only_straight: bool = False

    @property
    @abc.abstractmethod
    def reads_base(self) -> bool:
        """True if the delta depends on the base's own values."""

    @abc.abstractmethod
    def misfit(self, shape: tuple[int, int]) -> str:
        """Why a tensor of `O I` cannot be changed by it; empty if it can."""

    def rows(self, tensors: Mapping[str, Tensor], base_PI: Tensor | None, first: int, last: int) -> Tensor:
        """Rows `first:last` of the delta, `P I`.

        Args:
            tensors: by their stored names, in the dtype that is wanted.
            base_PI: these rows of the base, if it `reads_base`.
        """
        raise NotImplementedError(f"{type(self).__name__} gives factors")

    def factors(self, tensors: Mapping[str, Tensor], base_OI: Tensor | None, shape: tuple[int, int]) -> LowRank:
        """The whole delta, of this shape `O I`, as a product; for changes with a rank."""
        raise NotImplementedError(f"{type(self).__name__} has no factors")


@dataclass(frozen=True)
class Content:
    """Everything that an adapter holds.

    Args:
        changes: deltas.
        extras: tensors trained in full: name in the model -> stored name.
        problems: one sentence each.
        keeps_ties: a saved table and a head that is tied to it stay one, `ensure_weight_tying`.
    """

    changes: Sequence[Change]
    extras: Mapping[str, str]
    problems: Sequence[str]
    keeps_ties: bool = False


@dataclass(frozen=True)
class Reader:
    """One family of adapters of PEFT.

    Args:
        name: as users know it.
        claims: true for the config of such an adapter.
        read: its content, from the stored tensors' headers and the config.
        why_no_factors: why an adapter cannot be merged from it without a base, as the end of a sentence.
    """

    name: str
    claims: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, TensorSpec], Mapping[str, Any]], Content]
    why_no_factors: str


@dataclass(frozen=True)
class Group:
    """The stored tensors of one module: role -> stored name, and their specs."""

    module: str
    names: Mapping[str, str]
    specs: Mapping[str, TensorSpec]

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of the tensor of a role; empty if there is none."""
        return self.specs[self.names[role]].shape if role in self.names else ()

    def missing(self, *roles: str) -> str:
        """One sentence if a tensor is missing, else empty."""
        lacking = [r for r in roles if r not in self.names]
        has = ", ".join(self.names.values())
        return f"module '{self.module}' has no {lacking[0]} (it has {has})" if lacking else ""


def shape_misfit(own: Sequence[int], shape: Sequence[int]) -> str:
    """Why a delta of the shape `own` does not fit a tensor of the base; empty where it does.

    >>> shape_misfit((4, 2), (4, 2)), shape_misfit((4, 2), (2, 4))
    ('', 'its delta is 4 x 2')
    """
    return "" if tuple(own) == tuple(shape) else f"its delta is {' x '.join(map(str, own))}"


def group_tensors(
    specs: Mapping[str, TensorSpec], roles: Sequence[str], family: str
) -> tuple[list[Group], dict[str, str], list[str]]:
    """Stored tensors by module; tensors trained in full; and problems.

    >>> spec = TensorSpec("base_model.model.fc.hada_w1_a", (4, 2), "float32", "")
    >>> groups, _, _ = group_tensors({spec.name: spec}, ["hada_w1_a"], "LoHa")
    >>> groups[0].module, groups[0].shape("hada_w1_a")
    ('fc', (4, 2))

    Args:
        roles: last parts of the names of the family's tensors; `.weight` may follow.
        family: for messages.
    """
    own = re.compile(r"(?P<module>.+?)\.(?P<role>" + "|".join(roles) + r")(?:\.weight)?")
    found: dict[str, dict[str, str]] = {}
    extras: dict[str, str] = {}
    problems: list[str] = []
    for name, spec in specs.items():
        bare = name.removeprefix(_PREFIX)
        match = own.fullmatch(bare)
        if not spec.is_floating or spec.dtype.startswith("float8"):
            problems.append(quantised_problem(spec))
        elif match is not None:
            found.setdefault(match["module"], {})[match["role"]] = name
        elif re.search(r"\.(lora_|hada_|lokr_|vera_|ia3_|oft_|trainable_tokens_)", "." + bare):
            problems.append(f"tensor '{name}' is no part of an adapter of the family {family}")
        elif not bare.endswith(".base_layer.weight"):
            extras[bare.replace(".base_layer.", ".")] = name
    groups = [Group(m, names, {n: specs[n] for n in names.values()}) for m, names in found.items()]
    if not groups and not extras and not problems:
        problems.append("the adapter holds no tensors")
    return groups, extras, problems


def scaling_config(fields: Mapping[str, Any]) -> tuple[AdapterConfig, list[str]]:
    """`r` and `alpha` of LoHa and LoKr, with their patterns, read as those of LoRA: `scaling = alpha / r`."""
    known = {k: fields[k] for k in ("r", "rank_pattern", "alpha_pattern") if k in fields}
    return parse_adapter_config({"peft_type": "LORA", "lora_alpha": fields.get("alpha", 8), **known})
