"""Token tables of a checkpoint (embeddings, output heads, their biases) and their names in another checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actmat.checkpoints.base import Checkpoint
from actmat.layout.ties import is_output_head, is_token_table, tied_partner

HEAD_BIASES = tuple(
    f"{head}.bias" for head in ("lm_head", "predictions", "predictions.decoder", "lm_head.decoder", "embed_out")
)


def token_tables(checkpoint: Checkpoint) -> tuple[tuple[str, ...], int]:
    """Names of tensors with one row per token, and the number of rows.

    The number is `vocab_size` of the config if a token embedding has that many rows, else the longest embedding's.
    """
    specs = {_plain(n): s for n, s in checkpoint.specs.items()}
    heights = {s.shape[0] for n, s in specs.items() if len(s.shape) == 2 and is_token_table(n)}
    if not heights:
        heights = {s.shape[0] for n, s in specs.items() if len(s.shape) == 2 and is_output_head(n)}
    if not heights:
        return (), 0
    declared = _declared(checkpoint.config)
    rows = declared if declared in heights else max(heights)
    names = [
        s.name
        for n, s in specs.items()
        if s.shape[:1] == (rows,) and (is_token_table(n) or is_output_head(n) or n.endswith(HEAD_BIASES))
    ]
    return tuple(names), rows


def table_names(name: str, own: Checkpoint, checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    """Name of a table in each checkpoint: the same, with or without a prefix, or the table tied to a head."""
    return tuple(name if c is own else _name_in(name, c) for c in checkpoints)


def _name_in(name: str, checkpoint: Checkpoint) -> str:
    tables = token_tables(checkpoint)[0]
    if name in tables:
        return name
    name = _plain(name)
    near = [t for t in tables if f".{_plain(t)}".endswith(f".{name}") or name.endswith(f".{_plain(t)}")]
    if len(near) == 1:
        return near[0]
    if is_output_head(name):
        partner = tied_partner(name, checkpoint.specs, checkpoint.config)
        return partner if partner in tables else ""
    return ""


def _plain(name: str) -> str:
    """Name in the model of a table that PEFT stores under its wrapper's."""
    return name.replace(".base_layer.", ".")


def _declared(config: Mapping[str, Any] | None) -> int:
    for level in (config, (config or {}).get("text_config")):
        if isinstance(level, Mapping) and isinstance(level.get("vocab_size"), int):
            return int(level["vocab_size"])
    return 0
