"""Adapters of separate projections (`q_proj`, `k_proj`, `v_proj`) for a base that packs them in one tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from actmat.checkpoints.base import Checkpoint
from actmat.layout.fused import QKV

_QUERY = frozenset(
    ["q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v", "to_q", "to_k", "to_v", "wq", "wk", "wv"]
)
_GATE = frozenset({"gate_proj", "up_proj", "w1", "w3"})
_PACKED = {
    **dict.fromkeys((*QKV, "query_key_value", "in_proj_qkv", "in_proj_qkvz"), _QUERY),
    **dict.fromkeys(("gate_up_proj", "gate_and_up_proj"), _GATE),
}
"""Packed layer -> names of the layers that are packed in it."""
_TAIL = 3
"""Last parts of a block's name that the model and the checkpoint share, whatever their prefixes."""


def packed_problems(problems: Sequence[str], modules: Collection[str], base: Checkpoint) -> list[str]:
    """The problems of fitting an adapter; those of modules that the base packs are one sentence.

    Args:
        problems: one sentence each.
        modules: of the adapter.
        base: the checkpoint that it does not fit.
    """
    packed: dict[str, str] = {}
    for name in base.specs:
        block, _, layer = name.removesuffix(".weight").rpartition(".")
        if layer in _PACKED:
            for part in _PACKED[layer]:
                packed[f"{_tail(block)}.{part}"] = name
    lost = {m: packed[tail] for m in modules if (tail := _tail(m, 1)) in packed}
    unfit = {p.split("'")[1] for p in problems if p.startswith("module '") and "finds no tensor" in p}
    explained = lost.keys() & unfit
    if not explained:
        return list(problems)
    first = next(m for m in lost if m in explained)
    text = (
        f"{len(explained)} modules such as '{first}' have a delta each, and the base ({base.location}) packs them, as "
        f"in '{lost[first]}': a delta of a packed tensor is not put together from several. Fix: give the base in the "
        "layout that the adapter was trained on, or fold the adapter into that one (merge_and_unload), save it in that "
        "of this base, and merge the full models"
    )
    return [text, *(p for p in problems if not (p.startswith("module '") and p.split("'")[1] in explained))]


def _tail(name: str, more: int = 0) -> str:
    return ".".join(name.split(".")[-_TAIL - more :])
