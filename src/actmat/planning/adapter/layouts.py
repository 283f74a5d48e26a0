"""Form of a merged adapter: the tensors of the base that it implies, its own names and tensors, its config.

Scaling is exactly 1, module names are full, ranks as written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.fields import AXES, ORDERS
from actmat.experts.lora.modules import AdapterLayout, AdapterModule
from actmat.experts.lora.names import PREFIX
from actmat.experts.lora.stacks import HOW_TO_SAY, WRITERS, axes_by_version, release_of
from actmat.layout.types import Orientation
from actmat.planning.item import Item
from actmat.recipe import Recipe


def _tensor_name(name: str, found: Sequence[AdapterModule | None]) -> str:
    """Name of the tensor that a module's delta belongs to, as the model has it."""
    plain = name.replace(".base_layer", "")
    module = next((m for m in found if m is not None and m.kind == "parameter"), None)
    if module is None:
        return f"{plain}.weight"
    nest = module.name[len(module.name.replace(".base_layer", "")) :].lstrip(".")  # of a parameter without a name
    return f"{plain}.{module.parameters[0] if len(module.parameters) == 1 else nest or 'weight'}"


def is_transposed(found: Sequence[AdapterModule | None], adapters: Sequence[Adapter]) -> bool:
    """True if the base stores the tensor of a module as `I O` (GPT-2's `Conv1D`)."""
    adapter, module = next((a, m) for a, m in zip(adapters, found, strict=True) if m is not None)
    return module.kind == "linear" and adapter.config.fan_in_fan_out


def stored_spec(name: str, found: Sequence[AdapterModule | None], adapters: Sequence[Adapter]) -> TensorSpec:
    """The base's tensor as the adapters imply it: its shape, transposed for Conv1D, opened up for convolutions."""
    adapter, module = next((a, m) for a, m in zip(adapters, found, strict=True) if m is not None)
    shape = module.shape
    if is_transposed(found, adapters):
        shape = (shape[1], shape[0])
    elif module.kind == "convolution":
        shape = (shape[0], *module.kernel)
    return TensorSpec(_tensor_name(name, found), shape, adapter.dtype, adapter.location)


ALPHA = ".alpha"
"""End of the name of a scale in kohya's layout and ComfyUI's: the rank, so that the factor of `B A` is 1."""

STEMS: dict[AdapterLayout, str] = {
    "peft": "adapter_model",
    "kohya": "pytorch_lora_weights",
    "diffusers": "pytorch_lora_weights",
    "comfy": "pytorch_lora_weights",
}
"""Names of the written files; `load_lora_weights` of diffusers finds the last three."""
IN_ONE_FILE = frozenset({"kohya", "diffusers", "comfy"})
"""Layouts of files without a config."""


def output_layout(recipe: Recipe, adapters: Sequence[Adapter]) -> AdapterLayout:
    """The layout of the recipe; else the first file layout among the adapters; else PEFT's."""
    if recipe.adapter.layout != "same":
        return recipe.adapter.layout
    found = {a.layout for a in adapters}
    return adapters[0].layout if len(found) == 1 or found <= IN_ONE_FILE else "peft"


def needs_one_spelling(adapters: Sequence[Adapter]) -> bool:
    """True if files of kohya's layout share no module: they may spell the same modules in two ways."""
    spelled = [a.modules.keys() for a in adapters if a.layout == "kohya"]
    return len(spelled) > 1 and any(not (one & two) for one in spelled for two in spelled)


def module_outputs(
    name: str, module: AdapterModule, layout: AdapterLayout, rank: int, dtype: str, *, has_bias: bool
) -> tuple[TensorSpec, ...]:
    """The stored tensors of a module: A and B, and a bias (PEFT) or a scale (kohya)."""
    *batch, rows, columns = module.shape
    if module.is_turned:
        rows, columns = columns, rows
    n = rank * math.prod(batch)
    if module.kind == "embedding":
        shapes: tuple[tuple[int, ...], tuple[int, ...]] = (n, rows), (columns, n)
    elif module.kind == "convolution":
        ones = (1,) * (len(module.kernel) - 1)
        shapes = (n, *module.kernel), (rows, n, *ones)
    else:
        shapes = (n, columns), (rows, n)
    a, b = _factor_names(name, module, layout)
    out = [TensorSpec(a, shapes[0], dtype, ""), TensorSpec(b, shapes[1], dtype, "")]
    if layout in ("kohya", "comfy"):
        out.append(TensorSpec(name + ALPHA, (), "float32", ""))
    elif has_bias:
        out.append(TensorSpec(b.removesuffix("weight") + "bias", (rows,), dtype, ""))
    return tuple(out)


def _factor_names(name: str, module: AdapterModule, layout: AdapterLayout) -> tuple[str, str]:
    if layout in ("kohya", "comfy"):
        return f"{name}.lora_down.weight", f"{name}.lora_up.weight"
    start, end = f"{PREFIX if layout == 'peft' else ''}{name}.lora_", ".weight"
    if module.kind == "embedding" and layout == "peft":
        start, end = f"{start}embedding_", ""
    return f"{start}A{end}", f"{start}B{end}"


def output_config(
    recipe: Recipe, adapters: Sequence[Adapter], modules: Sequence[Item], extras: Sequence[Item]
) -> dict[str, Any]:
    """Config with which PEFT loads the output: `lora_alpha = r` everywhere, so that its scaling is 1.

    Modules are listed with their full names, because endings would also match modules that no expert adapted. Where
    ranks differ (`ranks: pattern`), `rank_pattern` and `alpha_pattern` name each.
    """
    first = adapters[0].config.fields
    bias_kinds = {a.config.bias for a in adapters}
    by_bias = bool(bias_kinds - {"none"})  # then biases are known to `bias`, not to `modules_to_save`
    saved = [e.name.rpartition(".")[0] for e in extras if not (by_bias and e.name.endswith(".bias"))]
    bases = [a.config.base_model for a in adapters if a.config.base_model]
    found = lora_config(
        [(_pattern_name(m, adapters), m.pair.rank) for m in modules],
        task_type=first.get("task_type"),
        base_model_name_or_path=bases[0] if bases else (recipe.base or None),
        lora_bias=any(len(m.outputs) > 2 for m in modules),
        bias=next(iter(sorted(bias_kinds - {"none"})), "none"),
        fan_in_fan_out=any(a.config.fan_in_fan_out for a in adapters),
        target_modules=[m.name for m in modules if m.pair.kind != "parameter"],
        modules_to_save=sorted(set(saved)) or None,
        auto_mapping=first.get("auto_mapping"),
        revision=first.get("revision"),
        target_parameters=sorted({p for a in adapters for p in a.config.target_parameters}) or None,
    )
    return {**found, **_version(adapters)}


def lora_config(ranks: Sequence[tuple[str, int]], **fields: Any) -> dict[str, Any]:
    """Config of plain LoRA of scaling 1: the most frequent rank, and the others by name.

    Args:
        ranks: of each module.
        fields: of this adapter.
    """
    counts = [n for _, n in ranks]
    common = max(set(counts), key=lambda n: (counts.count(n), n)) if counts else 1
    odd = {re.escape(m): n for m, n in ranks if n != common}
    found = {
        "peft_type": "LORA",
        "task_type": None,
        "auto_mapping": ...,
        "base_model_name_or_path": None,
        "revision": ...,
        "inference_mode": True,
        "r": common,
        "lora_alpha": common,
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "lora_bias": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": [],
        "target_parameters": ...,
        "modules_to_save": None,
        "rank_pattern": odd,
        "alpha_pattern": dict(odd),
        **fields,
    }
    return {key: value for key, value in found.items() if value is not ...}


def _pattern_name(module: Item, adapters: Sequence[Adapter]) -> str:
    """Name that PEFT matches patterns against: the module, or the bare parameter of a module."""
    plain = module.name.replace(".base_layer", "")
    found = next(m for a in adapters if (m := a.modules.get(module.name)) is not None)
    return f"{plain}.{found.parameters[0]}" if len(found.parameters) == 1 else plain


def stack_problems(labels: Sequence[str], adapters: Sequence[Adapter]) -> list[str]:
    """Stacked experts whose factors may have other axes in one adapter than in another, without a base to decide."""
    having = [(label, a) for label, a in zip(labels, adapters, strict=True) if _stacks(a)]
    if len({_axes(a) for _, a in having}) < 2:
        return []
    shapes = [{(m.name, m.shape) for m in _stacks(a) if m.shape[-1] != m.shape[-2]} for _, a in having]
    if set.intersection(*shapes):
        return []  # A is as wide in all of them, so that it reads the same axis
    listed = ", ".join(f"{label}: {_axes(a)}" for label, a in having)
    return [
        f"stacked experts may be stored with other axes in one adapter than in another ({listed}), and no stack that "
        "is not square tells. Write a full model (--base ..., --to model), or " + HOW_TO_SAY.format("e_i_o|e_o_i")
    ]


def _stacks(adapter: Adapter) -> list[AdapterModule]:
    return [m for m in adapter.modules.values() if m.is_stack]


def _axes(adapter: Adapter) -> str:
    """Axes of stacks as stated, else the versions of PEFT that write them alike."""
    said, release = adapter.config.said(AXES), release_of(adapter.config.version)
    if said is not None or release is None:
        return said or f"peft_version {adapter.config.version or 'not given'}"
    swapped = "PEFT 0.19.1 or later" if release > (0, 19, 0) else "PEFT 0.19.0"
    return "e_i_o" if release < (0, 19, 0) else swapped


def is_turned(now: Orientation, mirrored: Orientation, adapters: Sequence[Adapter]) -> bool:
    """True if `B A` of a stack is `I O`, from the orientations that its shape and the transposed one suggest.

    Where shapes leave it open, the orientations are that of the base, or of most families, and the version decides.
    """
    if now != mirrored:
        return now == "IO"
    return now == "OI" and any(_axes(a) == "e_i_o" for a in adapters if _stacks(a))


def _version(adapters: Sequence[Adapter]) -> dict[str, str]:
    """`peft_version` and `lora_B_layout`, by which stacks are read as those of the adapters were."""
    having = [a for a in adapters if _stacks(a)]
    versions = [a.config.version for a in having or adapters]
    known = sorted((v for v in versions if release_of(v)), key=lambda v: release_of(v) or ())
    newest = {"peft_version": known[-1]} if known and (len(known) == len(versions) or not having) else {}
    if said := next((w for a in having if (w := a.config.said(AXES)) is not None), None):
        newer = [v for v in known if axes_by_version(v, "OI", "") == said]
        newest = {"peft_version": newer[-1] if newer else WRITERS[said]}
    fields = {n for a in having for n in a.config.fields}
    marked = any(a.config.said(ORDERS) for a in having) or "lora_B_layout" in fields
    return {**newest, **({"lora_B_layout": "rank_major"} if marked else {})}
