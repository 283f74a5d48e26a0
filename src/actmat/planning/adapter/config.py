"""The `adapter_config.json` of a merged adapter: scaling exactly 1, full module names, ranks as written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from actmat.experts.lora.adapter import Adapter
from actmat.planning.model import Item
from actmat.recipe import Recipe

__all__ = ["output_config"]


def output_config(
    recipe: Recipe, adapters: Sequence[Adapter], modules: Sequence[Item], extras: Sequence[Item]
) -> dict[str, Any]:
    """Config with which PEFT loads the output: `lora_alpha = r` everywhere, so that its scaling is 1.

    Modules are listed with their full names, because endings would also match modules that no expert adapted. Where
    ranks differ (`ranks: pattern`), `rank_pattern` and `alpha_pattern` name each.
    """
    ranks = [m.pair.rank for m in modules]
    r = max(set(ranks), key=lambda n: (ranks.count(n), n)) if ranks else 1
    odd = {re.escape(_pattern_name(m, adapters)): m.pair.rank for m in modules if m.pair.rank != r}
    first = adapters[0].config.fields
    bias_kinds = {a.config.bias for a in adapters}
    by_bias = bool(bias_kinds - {"none"})  # then biases are known to `bias`, not to `modules_to_save`
    saved = [e.name.rpartition(".")[0] for e in extras if not (by_bias and e.name.endswith(".bias"))]
    parameters = sorted({p for a in adapters for p in a.config.target_parameters})
    bases = [a.config.base_model for a in adapters if a.config.base_model]
    return {
        "peft_type": "LORA",
        "task_type": first.get("task_type"),
        "auto_mapping": first.get("auto_mapping"),
        "base_model_name_or_path": bases[0] if bases else (recipe.base or None),
        "revision": first.get("revision"),
        "inference_mode": True,
        "r": r,
        "lora_alpha": r,
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "lora_bias": any(len(m.outputs) > 2 for m in modules),
        "bias": next(iter(sorted(bias_kinds - {"none"})), "none"),
        "fan_in_fan_out": any(a.config.fan_in_fan_out for a in adapters),
        "init_lora_weights": True,
        "target_modules": [m.name for m in modules if m.pair.kind != "parameter"],
        "target_parameters": parameters or None,
        "modules_to_save": sorted(set(saved)) or None,
        "rank_pattern": odd,
        "alpha_pattern": dict(odd),
    }


def _pattern_name(module: Item, adapters: Sequence[Adapter]) -> str:
    """Name that PEFT matches patterns against: the module, or the bare parameter of a module."""
    plain = module.name.replace(".base_layer", "")
    if module.pair.kind != "parameter":
        return plain
    names = {p for a in adapters for p in a.config.parameters_of(plain)}
    return f"{plain}.{next(iter(names))}" if len(names) == 1 else plain
