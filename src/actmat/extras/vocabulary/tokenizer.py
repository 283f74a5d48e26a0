"""Tokens of a model, from `tokenizer.json`, and its tables of them (embeddings, output heads, their biases).

A tokenizer with added tokens and its config are written here too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.bounds import read_object
from actmat.checkpoints.folder import member
from actmat.checkpoints.layer_names import split_layer
from actmat.checkpoints.model import Model
from actmat.errors import CheckpointError
from actmat.identity.tokens import TOKENIZER, listed_tokens
from actmat.layout.ties import is_output_head, is_token_table, tied_partner

ADDED: Mapping[str, Any] = {
    "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False,
}  # fmt: skip
"""Fields of a token that is added to a tokenizer, as `tokenizers` writes them."""


def read_tokenizer(model: Model) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Token -> row, and the entries of added tokens, from the `tokenizer.json` of a model.

    Raises:
        CheckpointError: the file is missing or has no vocabulary.
    """
    folder = model.folder.directory
    if folder is None or not (folder / TOKENIZER).exists():
        raise CheckpointError(
            f"{model.location}: {TOKENIZER} is missing; 'vocabulary' needs it to match rows by token. "
            "Fix: save the tokenizer next to the weights (AutoTokenizer.from_pretrained, save_pretrained)"
        )
    path = member(folder, TOKENIZER)
    tokens, added = listed_tokens(read_object(path), path)
    if not tokens:
        raise CheckpointError(f"{path}: expected a vocabulary (model.vocab), found none")
    return tokens, added


def written_tokenizer(folder: Path, entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Files of a tokenizer with added tokens: name -> text, for the files in the folder that list added tokens.

    Args:
        folder: folder of the tokenizer to extend.
        entries: the tokens, in the form of `tokenizer.json`, with their rows as `id`.
    """
    data = read_object(member(folder, TOKENIZER))
    data["added_tokens"] = [*(data.get("added_tokens") or []), *entries]
    written = {TOKENIZER: _text(data)}
    if os.path.lexists(folder / "tokenizer_config.json"):
        config = read_object(member(folder, "tokenizer_config.json"))
        if isinstance(config.get("added_tokens_decoder"), dict):
            fields = {str(e["id"]): {k: v for k, v in e.items() if k != "id"} for e in entries}
            config["added_tokens_decoder"] |= fields
            written["tokenizer_config.json"] = _text(config)
    if os.path.lexists(folder / "added_tokens.json"):
        listed = read_object(member(folder, "added_tokens.json"))
        written["added_tokens.json"] = _text(listed | {e["content"]: e["id"] for e in entries})
    return written


def config_with_tokens(config: Mapping[str, Any], rows: int, of_tokenizer: Mapping[str, Any] | None) -> dict[str, Any]:
    """A `config.json` for tables with `rows` rows, with the special token ids of the tokenizer's own model."""
    out = dict(config)
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        of_inner = (of_tokenizer or {}).get("text_config")
        out["text_config"] = config_with_tokens(inner, rows, of_inner if isinstance(of_inner, Mapping) else None)
    if "vocab_size" in out:
        out["vocab_size"] = rows
    for key, value in (of_tokenizer or {}).items():
        if key.endswith("_token_id") and (key in out or value is not None):
            out[key] = value
    return out


def _text(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


HEAD_BIASES = ("lm_head.bias", "predictions.bias", "predictions.decoder.bias", "lm_head.decoder.bias", "embed_out.bias")
"""Biases of heads, known by name where a model is as wide as it has tokens; elsewhere every vector outside of layers
with an entry per token is one."""


def token_tables(model: Model) -> tuple[tuple[str, ...], int]:
    """Names of tensors with one row per token, and the number of rows.

    The number is `vocab_size` of the config if a token embedding has that many rows, else the longest embedding's.
    """
    specs = {_plain(n): s for n, s in model.specs.items()}
    heights = {s.shape[0] for n, s in specs.items() if len(s.shape) == 2 and is_token_table(n)}
    if not heights:
        heights = {s.shape[0] for n, s in specs.items() if len(s.shape) == 2 and is_output_head(n)}
    if not heights:
        return (), 0
    config = model.config or {}
    levels = (c for c in (config, config.get("text_config")) if isinstance(c, Mapping))
    rows = next((n for c in levels if isinstance(n := c.get("vocab_size"), int) and n in heights), max(heights))
    tables = {n: s for n, s in specs.items() if s.shape[:1] == (rows,) and (is_token_table(n) or is_output_head(n))}
    is_clear = all(rows not in s.shape[1:] for s in tables.values())
    vectors = {n: s for n, s in specs.items() if s.shape == (rows,) and split_layer(n) is None}
    tables |= {n: s for n, s in vectors.items() if is_clear or n.endswith(HEAD_BIASES)}
    return tuple(s.name for n, s in specs.items() if n in tables), rows


def other_axes(model: Model, tables: Sequence[str], rows: int) -> list[str]:
    """Tensors outside of layers with an axis of the length of the vocabulary whose entries no table of rows holds.

    Empty for a model that is as wide as it has tokens, where lengths tell nothing.
    """
    is_clear = all(rows not in model.specs[n].shape[1:] for n in tables)
    of_tokens = [n for n, s in model.specs.items() if rows in s.shape and s.is_floating and n not in tables]
    return [n for n in of_tokens if is_clear and split_layer(n) is None]


def table_in(name: str, model: Model) -> str:
    """Name of a table in a model: the same, with or without a prefix, or the table tied to a head; or empty."""
    tables = token_tables(model)[0]
    if name in tables:
        return name
    name = _plain(name)
    near = [t for t in tables if f".{_plain(t)}".endswith(f".{name}") or name.endswith(f".{_plain(t)}")]
    if len(near) == 1:
        return near[0]
    if is_output_head(name):
        partner = tied_partner(name, model.specs, model.config)
        return partner if partner in tables else ""
    return ""


def _plain(name: str) -> str:
    """Name in the model of a table that PEFT stores under its wrapper's."""
    return name.replace(".base_layer.", ".")
