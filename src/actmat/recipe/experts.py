"""One expert of a recipe, and values of options."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from actmat.checkpoints.layer_names import stack_parts
from actmat.experts.lora.fields import AXES, ORDERS, StackWord
from actmat.flag import Flag
from actmat.recipe.values import Strict, Weight, read_option, read_value


def _finite(value: Any) -> Any:
    """`value` if all numbers in it are finite: no option of a method may be NaN or infinity."""
    todo = [value]
    while todo:
        inner = todo.pop()
        if isinstance(inner, float) and not math.isfinite(inner):
            raise ValueError(f"found {inner}, expected finite numbers")
        if isinstance(inner, dict | list | tuple):
            todo.extend(inner.values() if isinstance(inner, dict) else inner)
    return value


OptionValues = dict[str, Annotated[Any, AfterValidator(_finite), AfterValidator(read_option)]]
OwnOptions = dict[str, Annotated[Any, AfterValidator(_finite), AfterValidator(read_value)]]


RESERVED = {"base": "the base", "union": "the tokens of all models"}
"""Names that no expert may have -> their meaning."""


STANDARD = re.compile(r"(pytorch_lora_weights|adapter_model)\.(safetensors|bin)")
"""Files of diffusers and PEFT that have one name in every folder."""


def _last(path: Path) -> str:
    """The last part of a path that tells one expert from another."""
    return path.parent.name if STANDARD.fullmatch(path.name) and path.parent.name else path.name


class ExpertRef(Strict):
    """One expert: its location, name, weight and options."""

    TEXT = "path"

    path: str = Field(
        description="directory, file, hub id org/name[@revision], URL, model+adapter, or a stack of layers such as "
        "'a[0:16] + b[8:24]'"
    )
    name: str = Field(
        default="",
        description="short name for plans and records; default: last part of the path, with `-expert` after `base` or "
        "`union`, which are reserved",
    )
    weight: Annotated[
        Weight,
        Flag(
            ("--weight", "-w"),
            "Weight of an expert, in their order; a,b of one: two outputs.",
            repeated=True,
            type=str,
        ),
    ] = Field(
        default=1.0,
        description="weight, for methods that take weights: a number, a gradient over depth, or entries by pattern",
    )
    options: OwnOptions = Field(
        default_factory=dict,
        description="this expert's own values of options that take one number per expert, such as `density`; each a "
        "number, a gradient or entries, as `weight`",
    )
    statistics: Annotated[
        str, Flag(help="NAME=PATH of an expert's statistics, from 'actmat statistics collect'.", repeated=True)
    ] = Field(
        default="", description="statistics of this expert from `actmat statistics collect`, for methods that need them"
    )

    stacks: Annotated[
        tuple[StackWord, ...],
        BeforeValidator(lambda v: [w.strip() for w in v.split(",") if w.strip()] if isinstance(v, str) else v),
    ] = Field(
        default=(),
        description="how an adapter stores stacked experts, where its files do not tell: axes `e_i_o` or `e_o_i`, "
        "columns of B `rank_major` or `grouped_by_expert`; see docs/adapters.md",
    )

    @model_validator(mode="after")
    def _one_of_each(self) -> ExpertRef:
        for words in (AXES, ORDERS):
            if len(said := [w for w in self.stacks if w in words]) > 1:
                raise ValueError(f"stacks: found {' and '.join(said)}, expected one of them")
        return self

    @model_validator(mode="after")
    def _own_name(self) -> ExpertRef:
        if self.name in RESERVED:
            raise ValueError(
                f"name: {self.name!r} stands for {RESERVED[self.name]} in recipes and records; give another"
            )
        return self

    @property
    def label(self) -> str:
        """The name, or the last part of the path; of a stack, those of its checkpoints.

        >>> ExpertRef(path="experts/math").label, ExpertRef(path="experts/base").label
        ('math', 'base-expert')
        """
        return self.name or _label_of(self.path)


@functools.lru_cache(maxsize=1024)  # a plan and a manifest ask for it at every tensor
def _label_of(path: str) -> str:
    parts = dict.fromkeys(p.location for p in stack_parts(path)) or [path]
    label = "+".join(_last(Path(p.partition("@")[0])) or p for p in parts)
    return f"{label}-expert" if label in RESERVED else label
