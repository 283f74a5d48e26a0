"""Serving of merged adapters by vLLM, judged by the demands of its loader; vLLM itself is not needed.

| demand | source in vLLM |
|---|---|
| `r`, `lora_alpha`, `target_modules`; no `modules_to_save`, no `bias`, no DoRA | `lora/peft_helper.py` |
| `r <= --max-lora-rank`, which is one of a few numbers, 16 by default | `lora/peft_helper.py`, `config/lora.py` |
| one `lora_alpha / r` for all modules: `rank_pattern` and `alpha_pattern` are not read | `lora/peft_helper.py` |
| nothing but factors, called `[base_model.model.]MODULE.lora_A.weight` and so on | `lora/utils.py` |

Source: vLLM (https://github.com/vllm-project/vllm), versions 0.6 to 0.22.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actmat.planning.model import Item

__all__ = ["VLLM_RANKS", "serving_notes", "vllm_problems"]

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that every version of vLLM since 0.9 takes for `--max-lora-rank`; recent ones take 1 as well."""

VLLM_DEFAULT_RANK = 16


def vllm_problems(config: Mapping[str, Any], modules: Sequence[Item]) -> list[str]:
    """Why vLLM would refuse, or misread, an adapter with this `adapter_config.json`; empty when it can serve it."""
    problems = []
    if config["modules_to_save"]:
        problems.append(f"full tensors beside the factors ({', '.join(config['modules_to_save'])}): write a full model")
    if config["bias"] != "none" or config["lora_bias"]:
        problems.append("biases beside the factors: write a full model")
    if config["rank_pattern"]:
        problems.append("it does not read rank_pattern: write one rank for all with --ranks uniform")
    if (rank := max((m.pair.rank for m in modules), default=0)) > VLLM_RANKS[-1]:
        problems.append(f"rank {rank} is above its largest, {VLLM_RANKS[-1]}: give --rank, or write a full model")
    kinds = {"convolution": "convolutions", "parameter": "bare parameters (some mixtures of experts excepted)"}
    found = [text for kind, text in kinds.items() if any(m.pair.kind == kind for m in modules)]
    if found:
        problems.append(f"no adapters of {' or of '.join(found)}: write a full model")
    return problems


def serving_notes(config: Mapping[str, Any], modules: Sequence[Item]) -> list[str]:
    """A line for the plan where vLLM cannot serve the output, or not with its default settings."""
    problems = vllm_problems(config, modules)
    if problems:
        return ["vLLM cannot serve this output as an adapter. " + "; ".join(problems)]
    rank = max((m.pair.rank for m in modules), default=0)
    if rank > VLLM_DEFAULT_RANK:
        return [f"vLLM serves this output with --max-lora-rank {next(n for n in VLLM_RANKS if n >= rank)}"]
    return []
