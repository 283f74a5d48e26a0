"""`adapter_config.json` of a PEFT LoRA adapter: what scales which module, and what has no low-rank delta at all.

    W_0 + scaling * B A        scaling = alpha / r,  or alpha / sqrt(r) with `use_rslora`

`r` and `alpha` of one module come from `rank_pattern` and `alpha_pattern`: the first pattern that matches the end of
the module's name, as a regular expression, wins; else the adapter's own.

Source: PEFT (https://github.com/huggingface/peft), `LoraConfig`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AdapterConfig", "parse_adapter_config"]

REFUSED_TYPES = {
    "LOHA": "a Hadamard product of low-rank factors (LoHa) is not low rank",
    "LOKR": "a Kronecker product (LoKr) is not low rank",
    "VERA": "VeRA shares frozen random factors that only PEFT draws",
    "ADALORA": "AdaLoRA scales its factors by a third one",
    "IA3": "(IA)^3 multiplies the base weights",
    "OFT": "OFT rotates the base weights",
    "BOFT": "BOFT rotates the base weights",
}
"""`peft_type` -> why its delta has no factors that could be read off."""

REFUSED_FLAGS = {
    "use_dora": "DoRA normalises W_0 + B A, so that its delta depends on the base and is not low rank",
    "alora_invocation_tokens": "activated LoRA applies its delta to some tokens only; no weight equals it",
    "use_qalora": "QA-LoRA pools the inputs of a quantised base",
    "use_bdlora": "block-diagonal LoRA has another shape of factors",
    "arrow_config": "Arrow routes between adapters at run time",
    "velora_config": "VeLoRA is not read",
    "kasa_config": "KaSA is not read",
    "monteclora_config": "MonteCLoRA draws its weights at run time",
    "layer_replication": "layer replication gives one base layer several deltas",
    "trainable_token_indices": "trainable tokens replace rows of the embedding",
    "megatron_config": "Megatron's parallel layers are not read",
}
"""Fields of a LoRA config -> why an adapter that sets them has no plain low-rank delta."""


REFUSED_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` (or how they begin) that subtract the first `B A` from the base or replace it: the
delta from the untouched base is not in the file. PEFT converts such adapters when it saves them."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What `adapter_config.json` says about the deltas; `fields` is the file as it is."""

    r: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    fan_in_fan_out: bool = False
    target_parameters: tuple[str, ...] = ()
    bias: str = "none"
    base_model: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Rank of the module called `module` in the model."""
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.r)

    def scaling_of(self, module: str) -> float:
        """Factor of `B A` for that module."""
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return float(alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def parameters_of(self, module: str) -> tuple[str, ...]:
        """Names of the bare parameters of `module` that are targeted; none for a module that is a layer itself."""
        found = []
        for target in self.target_parameters:
            owner, _, name = target.rpartition(".")
            if not owner or module == owner or module.endswith("." + owner):
                found.append(name)
        return tuple(sorted(found))


def _matching(patterns: Mapping[str, Any], module: str) -> str:
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", module)), "")


def parse_adapter_config(fields: Mapping[str, Any]) -> tuple[AdapterConfig, list[str]]:
    """The config, and everything in it that forbids reading the adapter's deltas, one sentence each."""
    problems: list[str] = []
    kind = fields.get("peft_type")
    if kind != "LORA":
        why = REFUSED_TYPES.get(str(kind), "only LoRA adapters have factors that are merged here")
        problems.append(
            f"peft_type is {kind!r}: {why}. Fold it into its base (PeftModel.merge_and_unload, save_pretrained) and "
            "merge the full models"
        )
    for name, why in REFUSED_FLAGS.items():
        if fields.get(name):
            problems.append(
                f"{name} is set: {why}. Fold the adapter into its base (PeftModel.merge_and_unload) and merge full "
                "models, where PEFT can do that"
            )
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(REFUSED_STARTS):
        problems.append(
            f"init_lora_weights is {start!r}: training started from a changed base, so that B A is not the delta from "
            "the base as it is published. PEFT converts PiSSA, OLoRA and CorDA to plain LoRA when it saves them with "
            "path_initial_model_for_weight_conversion; of others, merge the full models"
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha", 8)
    if kind == "LORA" and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 1):
        problems.append(f"expected a positive integer rank 'r', found {rank!r}; is the file complete?")
    if not _is_number(alpha):
        problems.append(f"expected a finite number 'lora_alpha', found {alpha!r}")
    patterns: dict[str, dict[str, Any]] = {}
    for name in ("rank_pattern", "alpha_pattern"):
        value = fields.get(name) or {}
        patterns[name] = {}
        if not isinstance(value, Mapping):
            problems.append(f"expected '{name}' to map patterns to numbers, found {value!r}")
            continue
        for pattern, number in value.items():
            good = _is_number(number) and (name == "alpha_pattern" or (isinstance(number, int) and number > 0))
            if good and _compiles(pattern):
                patterns[name][pattern] = number
            else:
                problems.append(f"{name} has the entry {pattern!r}: {number!r}, which is no pattern with a number")
    parameters = fields.get("target_parameters") or ()
    config = AdapterConfig(
        r=rank if isinstance(rank, int) and rank > 0 else 1,
        alpha=float(alpha) if _is_number(alpha) else 1.0,
        use_rslora=bool(fields.get("use_rslora")),
        rank_pattern=patterns["rank_pattern"],
        alpha_pattern=patterns["alpha_pattern"],
        fan_in_fan_out=bool(fields.get("fan_in_fan_out")),
        target_parameters=tuple(map(str, parameters)) if isinstance(parameters, list | tuple) else (),
        bias=str(fields.get("bias") or "none"),
        base_model=str(fields.get("base_model_name_or_path") or ""),
        fields=fields,
    )
    return config, problems


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _compiles(pattern: Any) -> bool:
    try:
        re.compile(pattern)
    except (re.error, TypeError):
        return False
    return True
