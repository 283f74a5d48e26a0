"""Notes for the reader of the plan of a merged adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.open import PAIR_LIST
from actmat.planning.adapter.serving import serving_notes
from actmat.planning.model import Item
from actmat.recipe import Recipe

__all__ = ["plan_notes"]


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
            notes.append(f"expert '{label}' leaves {len(missing)} modules alone (a zero delta there): {shown}")
        if adapter.copies:
            notes.append(f"expert '{label}' holds copies of base weights ({', '.join(adapter.copies)}); not merged")
    dense = [m for m in modules if m.form == "dense"]
    if dense:
        notes.append(
            f"{len(dense)} modules are merged on dense deltas and cut to rank {max(m.pair.rank for m in dense)}: "
            "'relative_error' in the records tells what that leaves out"
        )
    widths = {m.pair.rank for m in modules}
    if recipe.adapter.ranks == "uniform" and widths and any(m.pair.rank > m.pair.exact_rank for m in modules):
        notes.append(f"all modules are written with rank {max(widths)}, padded with zeros; 'ranks: pattern' avoids it")
    lists = [label for label, a in zip(recipe.labels, adapters, strict=True) if a.is_pair_list]
    if lists:
        notes.append(
            f"{', '.join(lists)}: lists of (up, down) pairs without names, alpha or config. Modules are called "
            f"{PAIR_LIST}.NNNN in the order of the list, the scaling is taken as 1, and lists are taken to be of one "
            "model; PEFT and vLLM cannot load the output, which does not say where a pair belongs"
        )
    elif config is not None:
        notes += serving_notes(config, modules)
    return notes
