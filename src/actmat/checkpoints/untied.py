"""Models whose output head is untied from the token table: a copy of the table is a tensor of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actmat.checkpoints.composed import renamed
from actmat.checkpoints.model import Model

TIE = "tie_word_embeddings"


def untie(model: Model, heads: Mapping[str, str], *notes: str) -> Model:
    """The model with a copy of the token table for each output head that is tied to it.

    Its config says `tie_word_embeddings: false`, also the config of an output.

    Args:
        model: closed with the result.
        heads: name of an output head -> token table that has its values.
        notes: why it is untied, for plans.
    """
    stored = model.tensors
    copies = {head: table for head, table in heads.items() if head not in stored.specs}
    tables = {name: copies.get(name, name) for name in (*stored.specs, *copies)}
    aliases = {a: c for a, c in stored.aliases.items() if not {a, c} & heads.keys()}
    folder = replace(model.folder.with_config(untied_config).noted(*notes), untied=dict(heads))
    return Model(renamed(stored, tables, aliases), folder)


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `tie_word_embeddings: false`, also in nested configs that have this entry.

    >>> untied_config({"text_config": {"tie_word_embeddings": True}})
    {'text_config': {'tie_word_embeddings': False}, 'tie_word_embeddings': False}
    """
    nested = {k: untied_config(v) for k, v in config.items() if isinstance(v, Mapping) and TIE in v}
    return {**config, **nested, TIE: False}
