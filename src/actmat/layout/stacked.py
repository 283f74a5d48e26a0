"""Layout of the experts of a mixture that are stacked in one 3-D tensor: orientation and packed blocks.

Libraries differ: Mixtral-like modules hold `E x 2F x H` and `E x H x F`, GPT-OSS and Llama 4 the transposes, and
Qwen3-VL-MoE transposes when it saves. The pair of shapes decides. With `gate_up (E, a, b)` and `down (E, c, d)`, `OI`
means `a = 2d, b = c` and `IO` means `a = d, b = 2c`: never both.

Shapes: `E` experts, `H` hidden size, `F` width of an expert.
"""

from __future__ import annotations

import re

from actmat.layout.fused import GATED, gate_and_up
from actmat.layout.packing import Packing
from actmat.layout.towers import Tower
from actmat.layout.types import Orientation, Role, TensorLayout

__all__ = ["is_stacked", "stacked_layout"]

Shape = tuple[int, ...]

UP = frozenset({*GATED, "up_proj", "gate_proj", "w1"})
DOWN = frozenset({*GATED.values(), "down_proj"})
_STACKED_ANYWHERE = frozenset(
    {"gate_up_proj", "gate_and_up_projs", "down_projs", "w13_weight", "w2_weight", "input_linear", "output_linear"}
)
_EXPERTS = re.compile(r"(?:^|[._])experts?(?:[._]|$)")


def is_stacked(name: str, owner: str, shape: Shape) -> bool:
    """Return True for a 3-D tensor whose name is that of stacked experts."""
    return len(shape) == 3 and (owner in _STACKED_ANYWHERE or (_EXPERTS.search(name) is not None))


def stacked_layout(owner: str, shape: Shape, partner: Shape | None, tower: Tower) -> TensorLayout:
    """Layout of a 3-D stack of weights; `owner` names its layer or parameter (`gate_up_proj`, `down_proj`, ...)."""
    up, down = (shape, partner) if owner in UP else (partner, shape)
    orientation, how = _orientation(owner, shape, up, down, tower)
    rows = shape[1] if orientation == "OI" else shape[2]
    stored = "E x O x I" if orientation == "OI" else "E x I x O"
    why = f"{shape[0]} stacked experts stored {stored} ({how}), name ends in {owner}"
    packing = _packing(owner, rows, orientation, up, down, tower)
    blocks = packing.blocks(rows) if packing else None
    if packing is None or blocks is None:
        return TensorLayout(Role.STACKED_EXPERTS, why, orientation)
    return TensorLayout(Role.STACKED_EXPERTS, f"packed {packing.words}, {rows} rows, {why}", orientation, blocks)


def _orientation(
    owner: str, shape: Shape, up: Shape | None, down: Shape | None, tower: Tower
) -> tuple[Orientation, str]:
    if up is not None and down is not None and len(up) == len(down) == 3:
        (_, a, b), (_, c, d) = up, down
        readings: dict[tuple[int, int], Orientation] = {(d, 2 * c): "IO", (2 * d, c): "OI"}
        if (a, b) in readings:
            return readings[a, b], "its shape and its partner's agree on no other reading"
    hidden = tower.hidden
    _, first, second = shape
    if hidden is not None and first != second and hidden in (first, second) and owner in (UP | DOWN):
        inputs_last = (second == hidden) == (owner in UP)
        return ("OI" if inputs_last else "IO"), f"hidden size {hidden}"
    if tower.listed:
        return tower.family.experts, "as this family stores them"
    return "OI", "shape and config leave it open, taken as in most families"


def _packing(
    owner: str, rows: int, orientation: Orientation, up: Shape | None, down: Shape | None, tower: Tower
) -> Packing | None:
    """Gate and up, for a layer whose name allows both and whose rows are twice the inputs of its partner."""
    if owner not in GATED:
        return None
    if down is not None and len(down) == 3:
        width = down[2] if orientation == "OI" else down[1]
        if rows != 2 * width:
            return None
    elif owner not in ("gate_up_proj", "gate_and_up_projs", "w13_weight"):
        return None
    packing = gate_and_up(owner, rows, tower)
    return packing if isinstance(packing, Packing) else None
