"""The layout in which a merged adapter is written: names of its modules, and the tensors of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actmat.checkpoints.base import TensorSpec
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.modules import AdapterLayout, AdapterModule
from actmat.experts.lora.naming import module_names
from actmat.recipe import Recipe

__all__ = ["ALPHA", "STEMS", "in_one_layout", "module_outputs", "output_layout"]

ALPHA = ".alpha"
"""End of the name of a scale in kohya's layout: the rank, so that the factor of `B A` is 1."""

STEMS: dict[AdapterLayout, str] = {
    "peft": "adapter_model",
    "pairs": "adapter_model",
    "kohya": "pytorch_lora_weights",
    "diffusers": "pytorch_lora_weights",
}
"""Names of the written files; `load_lora_weights` of diffusers finds the last two."""


def output_layout(recipe: Recipe, adapters: Sequence[Adapter]) -> AdapterLayout:
    """The layout that the recipe names, else that of the adapters, else PEFT's."""
    if recipe.adapter.layout != "same":
        return recipe.adapter.layout
    found = {a.layout for a in adapters}
    return found.pop() if len(found) == 1 else "peft"


def in_one_layout(
    recipe: Recipe, adapters: Sequence[Adapter], layout: AdapterLayout
) -> tuple[list[Adapter], list[str]]:
    """The adapters with their modules by the names of the output, and problems."""
    out: list[Adapter] = []
    problems: list[str] = []
    for label, adapter in zip(recipe.labels, adapters, strict=True):
        names, found = module_names(adapter, layout)
        if adapter.layout != layout and adapter.extras:
            found.append(f"'{layout}' has no names for its tensors trained in full ({', '.join(adapter.extras)})")
        problems += [f"expert '{label}' ({adapter.location}) cannot be written as '{layout}': {p}" for p in found]
        out.append(adapter.renamed(names))
    return out, problems


def module_outputs(
    name: str, module: AdapterModule, layout: AdapterLayout, rank: int, dtype: str, *, has_bias: bool
) -> tuple[TensorSpec, ...]:
    """The stored tensors of a module: A and B, and a bias (PEFT) or a scale (kohya)."""
    *batch, rows, columns = module.shape
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
    if layout == "kohya":
        out.append(TensorSpec(name + ALPHA, (), "float32", ""))
    elif has_bias:
        out.append(TensorSpec(b.removesuffix("weight") + "bias", (rows,), dtype, ""))
    return tuple(out)


def _factor_names(name: str, module: AdapterModule, layout: AdapterLayout) -> tuple[str, str]:
    if layout == "kohya":
        return f"{name}.lora_down.weight", f"{name}.lora_up.weight"
    if layout == "diffusers":
        return f"{name}.lora_A.weight", f"{name}.lora_B.weight"
    if module.name == name and not module.path:  # as PEFT, or a list of pairs, stores it
        return module.a, module.b
    return f"base_model.model.{name}.lora_A.weight", f"base_model.model.{name}.lora_B.weight"
