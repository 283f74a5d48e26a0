"""Notes on a merged adapter, and its serving by vLLM, judged by the demands of its loader; vLLM is not needed.

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

from actmat.experts.lora.adapter import Adapter
from actmat.methods import get_method
from actmat.planning.item import Item
from actmat.recipe import Recipe


def plan_notes(
    recipe: Recipe,
    adapters: Sequence[Adapter],
    names: Sequence[str],
    modules: Sequence[Item],
    config: Mapping[str, Any] | None,
) -> list[str]:
    """Zero deltas, copies, near sums, truncations, padding, and who can load the output."""
    notes = []
    for label, adapter in zip(recipe.labels, adapters, strict=True):
        missing = [n for n in names if n not in adapter.modules]
        if missing:
            shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            notes.append(f"expert '{label}' does not change {len(missing)} modules (a zero delta there): {shown}")
        if adapter.copies:
            notes.append(f"expert '{label}' holds copies of base weights ({', '.join(adapter.copies)}); not merged")
    dense = [m for m in modules if not m.is_factored]
    if dense:
        notes.append(
            f"{len(dense)} modules are merged on dense deltas and cut to rank {max(m.write.rank for m in dense)}: "
            "'relative_error' in the records is the share that is lost"
        )
    notes += _stack_notes(modules)
    widths = {m.write.rank for m in modules}
    if recipe.adapter.ranks == "uniform" and widths and any(m.write.rank > m.write.exact_rank for m in modules):
        notes.append(f"all modules are written with rank {max(widths)}, padded with zeros; 'ranks: pattern' avoids it")
    if config is not None:
        problems = vllm_problems(config)
        if any(m.module.kind == "convolution" for m in modules):
            problems.append("it adapts convolutions (write a full model)")
        if problems:
            notes.append(f"vLLM cannot serve this output as an adapter: {'; '.join(problems)}")
        elif flags := vllm_flags(config):
            notes.append(f"vLLM serves this output with {' '.join(flags)}")
    return notes


def _stack_notes(modules: Sequence[Item]) -> list[str]:
    """Notes on methods that act on a tensor as a whole, here on a whole stack of experts."""
    stacks: dict[str, list[str]] = {}
    for item in modules:
        whole = item.call is not None and get_method(item.call.method).acts_on == "tensor"
        if len(item.shape) == 3 and whole and item.call is not None and item.call.options.get("trim") != "global":
            stacks.setdefault(item.call.method, []).append(item.name)
    return [
        f"{method} acts on whole tensors: here on stacks with all their experts ({len(names)}, such as '{names[0]}'), "
        "as on those of a checkpoint that stores stacks; where a checkpoint stores single experts, on each of them"
        for method, names in stacks.items()
    ]


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that every version of vLLM since 0.9 takes for `--max-lora-rank`; recent ones take 1 as well."""

VLLM_DEFAULT_RANK = 16


def vllm_problems(config: Mapping[str, Any]) -> list[str]:
    """Why vLLM would refuse, or misread, an adapter with this `adapter_config.json`; empty when it can serve it."""
    problems = []
    if config.get("modules_to_save") or config.get("bias", "none") != "none" or config.get("lora_bias"):
        problems.append("it has full tensors or biases (write a full model)")
    if config.get("target_parameters"):
        problems.append("it adapts bare parameters (write a full model)")
    if config.get("rank_pattern"):
        problems.append("it has several ranks (write it with --set ranks=uniform)")
    if (rank := largest_rank(config)) > VLLM_RANKS[-1]:
        problems.append(f"its rank {rank} exceeds vLLM's maximum, {VLLM_RANKS[-1]} (merge with --rank)")
    return problems


def largest_rank(config: Mapping[str, Any]) -> int:
    """Largest rank of an adapter."""
    return max([int(config.get("r") or 0), *map(int, (config.get("rank_pattern") or {}).values())])


def vllm_flags(config: Mapping[str, Any]) -> list[str]:
    """Flags with which vLLM serves an adapter that it can serve; empty for its default settings."""
    rank = largest_rank(config)
    return ["--max-lora-rank", str(next(n for n in VLLM_RANKS if n >= rank))] if rank > VLLM_DEFAULT_RANK else []
