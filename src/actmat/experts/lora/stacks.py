"""Factors of stacked experts in an adapter of PEFT: which parameter they change, the order of B's columns, the axes.

PEFT stores the factors of a parameter `E x d1 x d2` as `A, (E R) x .` and `B, . x (R E)`. Three things that decide the
delta are not in the tensors:

* **Parameters.** Wrappers of one module nest, and are named by their place in the nest.
* **Order.** B's columns are `rank_major`, the expert running fastest, in PEFT; the experts of Unsloth's own kernels ran
  slowest, `grouped_by_expert`, before it wrote the field `lora_B_layout` (September 2026).
* **Axes.** A reads `d1` (`e_i_o`) in PEFT 0.17 and 0.18, and in 0.19.0 unless the module says `is_transposed`; from
  0.19.1 on it reads `d2` (`e_o_i`) unless the module says so, which experts stored `E I O` do in transformers 5 only.
  Transformers 5.0 to 5.8 swaps the axes of older versions in some processes. Shapes tell, except those of squares.

Sources: PEFT 0.17 to 0.21, `ParamWrapper`; transformers, `integrations/peft.py`; Unsloth, `moe_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from actmat.checkpoints.folder import ADAPTER_CONFIG, shown
from actmat.experts.lora.config import AdapterConfig
from actmat.experts.lora.fields import AXES, ORDERS, StackWord
from actmat.layout.fused import GATED
from actmat.layout.types import Orientation

MOST_PARAMETERS = 6
"""Wrappers of one module, all orders of which are tried."""
TURNED_ON_LOAD = frozenset({"qwen3_vl_moe", "qwen3_vl_moe_text"})
"""Values of `model_type` whose stacks transformers 5 transposes as it loads them, and transformers 4 does not."""

WRITERS: Mapping[StackWord, str] = {"e_i_o": "0.18.1", "e_o_i": "0.19.1"}
"""Axes -> a version of PEFT that writes and reads them, of stacks that are stored `E O I`."""

HOW_TO_SAY = "say it with --set stacks={}, or 'stacks' of the expert in a recipe"
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)(\.?(?:dev|rc|a|b).*)?(?:[+@].*)?")

FactorShape = Sequence[int]


def fitting_names(
    config: AdapterConfig, owner: str, rows: Sequence[int], shapes: Sequence[FactorShape]
) -> list[list[str]]:
    """For each wrapper of one module, the parameters that it may be of; empty if the config names none.

    All wrappers of a module share its number of experts, `rows / rank`, and a gated pair has shapes that tell.

    Args:
        owner: the module's name in the model.
        rows: of A, one number per wrapper.
        shapes: `O I` of each wrapper's `B A`.
    """
    names = config.parameters_of(owner, only_owned=True)
    if len(names) != len(rows):
        names = config.parameters_of(owner)
    if len(rows) > len(names) or len(names) > MOST_PARAMETERS:
        return [list(names) for _ in rows]
    ranks = {n: config.rank_of(f"{owner}.{n}") for n in names}
    orders = [p for p in permutations(names, len(rows)) if _agree(p, rows, shapes, ranks)]
    return [sorted({p[k] for p in orders} or names) for k in range(len(rows))]


def _agree(names: Sequence[str], rows: Sequence[int], shapes: Sequence[FactorShape], ranks: Mapping[str, int]) -> bool:
    """True if the wrappers can be those of these parameters, in this order."""
    counts = {divmod(r, ranks[n]) for n, r in zip(names, rows, strict=True)}
    if len(counts) > 1 or any(rest for _, rest in counts):
        return False
    of = dict(zip(names, shapes, strict=True))
    for up, down in GATED.items():
        if up in of and down in of:
            (a, b), (c, d) = of[up], of[down]
            return (a, b) in ((2 * d, c), (d, 2 * c)) or (c, d) not in ((2 * b, a), (b, 2 * a))
    return True


def is_grouped(config: AdapterConfig, owner: str, parameters: Sequence[str]) -> bool | str:
    """True if the columns of B are grouped by expert, False if they are rank-major; an error text if unknown."""
    said = config.said(ORDERS)
    stated = {said or _written_order(config.fields, f"{owner}.{p}") for p in parameters}
    unknown = [value for value in stated if value not in (*ORDERS, None)]
    if unknown:
        return (
            f"{ADAPTER_CONFIG}: expected lora_B_layout {' or '.join(ORDERS)}, found {shown(unknown[0])}, from which "
            f"the deltas of stacked experts cannot be formed; {HOW_TO_SAY.format('|'.join(ORDERS))}"
        )
    mapping = config.fields.get("auto_mapping")
    if stated == {None} and isinstance(mapping, Mapping) and mapping.get("unsloth_fixed"):
        return (
            f"{ADAPTER_CONFIG} comes from Unsloth and has no lora_B_layout: expected {' or '.join(ORDERS)}, since the "
            "columns of B can be read both ways. Unsloth that wrote no such field (before September 2026) trained "
            f"grouped_by_expert, PEFT's own layers are rank_major; {HOW_TO_SAY.format('|'.join(ORDERS))}"
        )
    if len(stated) > 1:
        return f"module '{owner}': lora_B_layout differs between its parameters, which its names do not tell apart"
    return stated == {"grouped_by_expert"}


def _written_order(fields: Mapping[str, Any], parameter: str) -> Any:
    """`lora_B_layout` of a parameter: Unsloth's entry for it, or the field; None without both."""
    detail = fields.get("unsloth_fused_expert_lora")
    entries = detail.get("parameters") if isinstance(detail, Mapping) else None
    for name, entry in entries.items() if isinstance(entries, Mapping) else ():
        if parameter.endswith(f".{name}") and isinstance(entry, Mapping) and "lora_B_layout" in entry:
            return entry["lora_B_layout"]
    return fields.get("lora_B_layout")


def ways_to_fit(
    shapes: Sequence[FactorShape], parameters: Sequence[Sequence[str]], stored: Mapping[str, FactorShape]
) -> dict[StackWord, list[tuple[str, ...]]]:
    """Axes -> the assignments of stored parameters to wrappers that their shapes allow; axes without any are left out.

    >>> ways_to_fit([(2, 4, 3)], [["up"]], {"up": (2, 3, 4)})
    {'e_i_o': [('up',)]}

    Args:
        shapes: `E O I` of each wrapper's `B A`.
        parameters: names of the parameters that each may be of.
        stored: name -> shape in the model.
    """
    out: dict[StackWord, list[tuple[str, ...]]] = {}
    for axes in AXES:
        expected = [tuple(s) if axes == "e_o_i" else (s[0], s[2], s[1]) for s in shapes]
        orders: Iterator[tuple[str, ...]] = permutations(list(stored)[:MOST_PARAMETERS], len(shapes))
        assignments = [
            names
            for names in orders
            if all(n in of and tuple(stored[n]) == e for n, of, e in zip(names, parameters, expected, strict=True))
        ]
        if assignments:
            out[axes] = assignments
    return out


def axes_by_version(version: str, orientation: Orientation, model_type: str) -> StackWord | None:
    """Axes of a stack by the version of PEFT that wrote it; None if other software decides as well.

    >>> axes_by_version("0.18.1", "OI", "olmoe"), axes_by_version("0.21.2", "OI", "olmoe")
    ('e_i_o', 'e_o_i')
    >>> axes_by_version("0.19.0", "OI", "olmoe") is axes_by_version("", "OI", "olmoe") is None
    True
    """
    release = release_of(version)
    if release is None or model_type in TURNED_ON_LOAD:
        return None
    if release < (0, 19, 0):
        return "e_i_o"
    return "e_o_i" if release > (0, 19, 0) and orientation == "OI" else None


def release_of(version: str) -> tuple[int, ...] | None:
    """Numbers of a version of PEFT; None without one, or for a development version from the time when axes changed."""
    match = _RELEASE.fullmatch(version)
    if match is None:
        return None
    release = tuple(int(match[k]) for k in (1, 2, 3))
    return None if match[4] and (0, 18, 0) < release < (0, 20, 0) else release
