"""Adapters of separate projections for a base that packs them in the rows of one tensor, and the reverse.

    [B_q A_q; 0; B_v A_v] = [[B_q, 0], [0, 0], [0, B_v]] [A_q; A_v]        rows of q, k, v; no module of k

The layout of the base says which rows are whose, also where they are interleaved. A packed delta is cut where its
layer's name fixes the order of the parts.

Shapes: `O` rows of a tensor, `I` inputs, `R` rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from actmat.layout.fused import QKV
from actmat.layout.types import Block, TensorLayout
from actmat.linalg.lowrank import LowRank

_Q, _K, _V, _GATE, _UP = (
    ("q_proj", "query", "q", "to_q", "wq"),
    ("k_proj", "key", "k", "to_k", "wk"),
    ("v_proj", "value", "v", "to_v", "wv"),
    ("gate_proj", "w1"),
    ("up_proj", "w3"),
)
_BLOCKS: Mapping[str, tuple[str, ...]] = {
    **{leaf: (b,) for b, leaves in zip(("q", "k", "v"), (_Q, _K, _V), strict=True) for leaf in leaves},
    **{leaf: (b,) for b, leaves in (("gate", _GATE), ("up", _UP)) for leaf in leaves},
    **{f"in_proj_{block}": (block,) for block in ("q", "k", "v", "z")},
    "in_proj_qkv": ("q", "k", "v"),
    "in_proj_b": ("beta",),
    "in_proj_a": ("decay",),
}
"""Layer that may be packed -> the blocks of the packed tensor that it occupies, in the order of its rows."""
_ATTENTION = ("qkv_proj", *sorted(QKV - {"qkv_proj", "in_proj_weight"}), "query_key_value")
_LINEAR_ATTENTION = ("in_proj_qkvz", "in_proj_qkv", "in_proj_ba")
_OWNERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*_Q, *_K, *_V), _ATTENTION),
    **dict.fromkeys((*_GATE, *_UP), ("gate_up_proj", "gate_and_up_proj")),
    **dict.fromkeys((leaf for leaf in _BLOCKS if leaf.startswith("in_proj_")), _LINEAR_ATTENTION),
}
"""Layer that may be packed -> names of the layers that pack it."""
_IN_ORDER: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "qkv_proj": (_Q, _K, _V),
    "W_pack": (_Q, _K, _V),
    "gate_up_proj": (_GATE, _UP),
}
"""Packed layer whose parts are one after the other in every model -> the names that each part may have."""


def names_of_packed(layer: str) -> list[str]:
    """Weights that may pack a layer, most likely ones first; empty for a layer that is never packed.

    >>> names_of_packed("h.0.up_proj")
    ['h.0.gate_up_proj.weight', 'h.0.gate_and_up_proj.weight']
    """
    block, _, leaf = layer.rpartition(".")
    dot = "." if block else ""
    bare = [f"{block}{dot}in_proj_weight"] if leaf in (*_Q, *_K, *_V) else []  # of torch's own attention
    return [*(f"{block}{dot}{owner}.weight" for owner in _OWNERS.get(leaf, ()) if owner != leaf), *bare]


def names_of_parts(layer: str) -> list[list[str]]:
    """The weights that each part of a packed layer may have, in the order of its rows; empty if unknown."""
    block, _, leaf = layer.rpartition(".")
    dot = "." if block else ""
    return [[f"{block}{dot}{name}.weight" for name in names] for names in _IN_ORDER.get(leaf, ())]


def rows_of(layer: str, layout: TensorLayout) -> tuple[Block, ...]:
    """Rows of a packed tensor that belong to a layer; empty if the layout does not know them."""
    by_name = {b.name: b for b in layout.blocks}
    names = _BLOCKS.get(layer.rpartition(".")[2], ())
    return tuple(by_name[n] for n in names) if names and all(n in by_name for n in names) else ()


def count_rows(blocks: Sequence[Block]) -> int:
    """Number of rows of these blocks."""
    return sum((b.stop - b.start) * b.groups for b in blocks)


def put_rows(out_OX: Tensor, values_NX: Tensor, blocks: Sequence[Block]) -> None:
    """Write rows, in order, to those of the blocks.

    >>> out = torch.zeros(6, 1)
    >>> put_rows(out, torch.tensor([[1.0], [2.0]]), (Block("k", 1, 2, groups=2),))
    >>> out.flatten().tolist()
    [0.0, 1.0, 0.0, 0.0, 2.0, 0.0]
    """
    start = 0
    for block in blocks:
        size, height = count_rows([block]), block.stop - block.start
        grouped = out_OX.view(block.groups, out_OX.shape[0] // block.groups, -1)
        grouped[:, block.start : block.stop] = values_NX[start : start + size].reshape(block.groups, height, -1)
        start += size


def packed_product(parts: Sequence[tuple[LowRank, Sequence[Block]]], rows: int) -> LowRank:
    """The delta of a packed tensor with `rows` rows, from the deltas of its layers."""
    first = parts[0][0]
    b_OR = first.b_OR.new_zeros(rows, sum(p.rank for p, _ in parts))
    column = 0
    for product, blocks in parts:
        put_rows(b_OR[:, column : column + product.rank], product.b_OR, blocks)
        column += product.rank
    return LowRank(b_OR, torch.cat([p.a_RI for p, _ in parts]))
