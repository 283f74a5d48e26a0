"""Groups of layers that share a factor: by kind (attention, mlp, other) and by depth (first, middle, last third)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from actmat.layout.patterns import compile_pattern
from actmat.planning.calls import depth_of
from actmat.planning.model import MergePlan

Grouping = Literal["none", "kind", "depth", "kind-depth"]
ALL = "all"
FIXED = "fixed"
"""Name of the group of tensors that the scale of a merge does not reach, such as biases."""

_ATTENTION = re.compile(r"attn|attention|\.[qkvo]_proj\.|query|key|value|\.(q|k|v|o)\.|qkv", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_?forward|\bfc\d?\b|DenseReluDense|intermediate|experts|(gate|up|down)_proj|\.wi|\.wo")
_THIRDS = ("first", "middle", "last")


def groups_of(plan: MergePlan, grouping: Grouping) -> dict[str, str]:
    """Every tensor of the output -> its group; tensors that the recipe's scale does not reach are in `FIXED`."""
    deepest = max((d for i in plan.items if (d := depth_of(i.name)) is not None), default=0)
    own = [([compile_pattern(p) for p in r.match], r.scale is not None) for r in plan.recipe.rules]
    out = {}
    for item in plan.items:
        has_own = next((scale for patterns, scale in own if any(matches(item.name) for matches in patterns)), False)
        group = _group(item.name, deepest, grouping) if item.obeys_scale and not has_own else FIXED
        out.update({spec.name: group for spec in item.outputs})
        if item.tied_to is not None:
            out[item.name] = out.get(item.tied_to, group)
    return out


def _group(name: str, deepest: int, grouping: Grouping) -> str:
    parts = []
    if grouping in ("kind", "kind-depth"):
        parts.append("attention" if _ATTENTION.search(name) else "mlp" if _MLP.search(name) else "other")
    if grouping in ("depth", "kind-depth"):
        depth = depth_of(name)
        parts.append("outside" if depth is None else _THIRDS[min(2, 3 * depth // (deepest + 1))])
    return "-".join(parts) or ALL


def group_rules(groups: Mapping[str, str], factors: Mapping[str, float]) -> list[dict[str, object]]:
    """Rules of a recipe that give the tensors of each group their scale."""
    return [
        {"match": patterns_for([n for n, g in groups.items() if g == group]), "scale": factor}
        for group, factor in factors.items()
        if group in set(groups.values())
    ]


def patterns_for(names: Sequence[str]) -> list[str]:
    """Globs for exactly these names: names that differ in one number become one pattern.

    >>> patterns_for(["h.0.fc.weight", "h.1.fc.weight", "head.weight"])
    ['h.{0,1}.fc.weight', 'head.weight']
    """
    families: dict[tuple[str, str], list[str]] = {}
    for name in names:
        before, number, after = re.findall(r"^(?:(.*?\.)(\d+)(?=\.))?(.*)$", name)[0]
        families.setdefault((before, after), []).append(number)
    return [
        before + (numbers[0] if len(numbers) == 1 else "{" + ",".join(numbers) + "}") + after
        for (before, after), numbers in families.items()
    ]
