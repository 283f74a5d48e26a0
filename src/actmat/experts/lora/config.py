"""`adapter_config.json` of a PEFT LoRA adapter: rank and scaling of each module, and settings without such a delta.

    W_0 + scaling * B A        scaling = alpha / r,  or alpha / sqrt(r) with `use_rslora`

`r` and `alpha` of one module come from `rank_pattern` and `alpha_pattern`: the first pattern that matches the end of
the module's name, as a regular expression, wins; else the adapter's own.

Source: PEFT (https://github.com/huggingface/peft), `LoraConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from actmat.checkpoints.folder import ADAPTER_CONFIG, shown
from actmat.checkpoints.keys import Keys
from actmat.experts.lora.fields import LORA, StackWord
from actmat.experts.lora.patterns import PatternTable
from actmat.experts.lora.targets import Targets
from actmat.layout.patterns import MatchError
from actmat.linalg.scaling import FLOAT32_MAX

MAX_RANK = 2**31 - 1
"""Far above the side of any matrix."""

REFUSED_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of values of `init_lora_weights` that subtract the first `B A` from the base or replace it: the delta
from the unchanged base is not in the file. PEFT can convert such adapters when it saves them."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Settings of an adapter that determine its deltas, and the whole file in `fields`.

    `stacks`: the user's statements on stacked experts, for files that lack them or are wrong.
    """

    r: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: PatternTable = field(default_factory=PatternTable)
    alpha_pattern: PatternTable = field(default_factory=PatternTable)
    fan_in_fan_out: bool = False
    target_parameters: tuple[str, ...] = ()
    targets: Targets = field(default_factory=lambda: Targets({}))
    stacks: tuple[StackWord, ...] = ()
    bias: str = "none"
    base_model: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Rank of the module called `module` in the model."""
        return int(self.rank_pattern.of_module(module, self.r))

    def scaling_of(self, module: str) -> float:
        """Factor of `B A` for that module."""
        alpha = self.alpha_pattern.of_module(module, self.alpha)
        rank = self.rank_of(module)
        return float(alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def parameters_of(self, module: str, *, only_owned: bool = False) -> tuple[str, ...]:
        """Names of the parameters of `module` that may be targeted; empty for a module that is targeted as a layer.

        A target without an owner (`gate_up_proj`) is a parameter of any module that is not targeted as a layer;
        `only_owned` leaves such out.
        """
        owned, bare = set(), set()
        for target in self.target_parameters:
            owner, _, name = target.rpartition(".")
            if not owner:
                bare.add(name)
            elif module == owner or module.endswith("." + owner):
                owned.add(name)
        if bare and not only_owned and not self.targets.has(module):
            owned |= bare
        return tuple(sorted(owned))

    def said(self, words: Collection[StackWord]) -> StackWord | None:
        """The user's statement among these words, if there is one."""
        return next((w for w in self.stacks if w in words), None)

    @property
    def trained_class(self) -> str:
        """Class of the model that it was trained on; empty if the file does not say."""
        mapping = self.fields.get("auto_mapping")
        return str(mapping.get("base_model_class") or "") if isinstance(mapping, Mapping) else ""

    @property
    def version(self) -> str:
        """Version of PEFT that wrote it; empty if the file does not say."""
        return str(self.fields.get("peft_version") or "")


def parse_adapter_config(
    fields: Mapping[str, Any], stacks: tuple[StackWord, ...] = ()
) -> tuple[AdapterConfig, list[str]]:
    """The config, and one sentence for everything in it that rules out a plain low-rank delta."""
    problems = _refusals(fields)
    rank, alpha = fields.get("r"), fields.get("lora_alpha", 8)
    if fields.get("peft_type") == "LORA" and not _is_rank(rank):
        problems.append(
            f"{ADAPTER_CONFIG}: expected a positive integer rank 'r' of at most {MAX_RANK}, found {shown(rank)}; "
            "is the file complete?"
        )
    if not _is_number(alpha):
        problems.append(
            f"{ADAPTER_CONFIG}: expected a finite number 'lora_alpha' of at most {FLOAT32_MAX:g}, found {shown(alpha)}"
        )
    rank_pattern, alpha_pattern = (_pattern(fields, name, problems) for name in ("rank_pattern", "alpha_pattern"))
    parameters = fields.get("target_parameters") or ()
    parameters = tuple(map(str, parameters)) if isinstance(parameters, list | tuple) else ()
    targets = Targets(fields)
    if targets.problem and any("." not in p for p in parameters):
        problems.append(targets.problem)
    config = AdapterConfig(
        r=rank if isinstance(rank, int) and _is_rank(rank) else 1,
        alpha=float(alpha) if _is_number(alpha) else 1.0,
        use_rslora=bool(fields.get("use_rslora")),
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        fan_in_fan_out=bool(fields.get("fan_in_fan_out")),
        target_parameters=parameters,
        targets=targets,
        stacks=stacks,
        bias=str(fields.get("bias") or "none"),
        base_model=str(fields.get("base_model_name_or_path") or ""),
        fields=fields,
    )
    return config, problems


def _refusals(fields: Mapping[str, Any]) -> list[str]:
    """One sentence for each setting under which the delta is not `scaling * B A`."""
    problems: list[str] = []
    kind = fields.get("peft_type")
    if kind != "LORA":
        problems.append(
            f"peft_type is {kind!r}: virtual tokens before an input, which change no weight: leave it out"
            if "num_virtual_tokens" in fields
            else f"peft_type is {kind!r}: only LoRA adapters have factors that are merged here. Fold it "
            "into its base (PeftModel.merge_and_unload, save_pretrained) and merge the full models"
        )
    problems += field_refusals(LORA, fields)
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(REFUSED_STARTS):
        problems.append(
            f"init_lora_weights is {start!r}: training started from a changed base, so that B A is not the delta from "
            "the base as it is published. PEFT converts PiSSA, OLoRA and CorDA to plain LoRA when it saves them with "
            "path_initial_model_for_weight_conversion; of others, merge the full models"
        )
    return problems


def field_refusals(keys: Keys, fields: Mapping[str, Any]) -> list[str]:
    """One sentence for each field that is set and that these lists refuse."""
    return [
        f"{name} is set: {why}. Fold the adapter into its base (PeftModel.merge_and_unload) and merge full "
        "models, where PEFT can do that"
        for name, why in keys.judge(fields).items()
        if why
    ]


def _pattern(fields: Mapping[str, Any], name: str, problems: list[str]) -> PatternTable:
    """The valid entries of `rank_pattern` or `alpha_pattern`; the others become problems."""
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        problems.append(f"expected '{name}' to map patterns to numbers, found {shown(value)}")
        value = {}
    is_valid = _is_number if name == "alpha_pattern" else _is_rank
    entries = {p: n for p, n in value.items() if isinstance(p, str) and is_valid(n)}
    others = [f"{shown(p)} with {shown(n)}" for p, n in value.items() if p not in entries]
    problems += [f"{name}: expected a pattern with a number, found {other}" for other in others]
    try:
        return PatternTable(entries, name)
    except MatchError as error:
        problems.append(str(error))
        return PatternTable()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= FLOAT32_MAX


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_RANK
