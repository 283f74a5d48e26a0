"""A checkpoint whose output head is a separate tensor, though it is stored tied to the token table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from actmat.checkpoints.base import Checkpoint, CheckpointHandle
from actmat.checkpoints.view import CheckpointView, DelegatingCheckpoint

TIE = "tie_word_embeddings"


class UntiedCheckpoint(DelegatingCheckpoint, CheckpointView):
    """The tensors of a checkpoint, with a copy of the token table for each output head that is tied to it.

    Its config says `tie_word_embeddings: false`, also the config of an output.

    Args:
        inner: the stored one, closed with this.
        heads: name of an output head -> token table that has its values.
        note: why it is untied, for plans.
    """

    def __init__(self, inner: Checkpoint, heads: Mapping[str, str], note: str = "") -> None:
        super().__init__(inner)
        self.heads = dict(heads)
        self.is_composed, self.written_sidecars = inner.is_composed, inner.written_sidecars
        self.notes = (*inner.notes, *([note] if note else []))
        self._copies = {head: table for head, table in self.heads.items() if head not in inner.specs}
        added = {head: replace(inner.specs[table], name=head) for head, table in self._copies.items()}
        self.specs = MappingProxyType({**inner.specs, **added})
        self.aliases = {a: c for a, c in inner.aliases.items() if not {a, c} & self.heads.keys()}

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Config of the untied model."""
        return None if self.inner.config is None else untied_config(self.inner.config)

    @property
    def written_config(self) -> Mapping[str, Any] | None:
        """The same for an output; None if the stored checkpoint has none."""
        written = self.inner.written_config
        if written is None:
            return None if self.directory is None else self.config
        return untied_config(written)

    def origin(self, name: str) -> tuple[Checkpoint, str]:
        """The stored checkpoint; a copied head is its table there."""
        return self.inner, self._copies.get(name, name)

    def handle(self) -> CheckpointHandle:
        """Address of the stored checkpoint, with the heads."""
        return replace(self.inner.handle(), heads=tuple(self.heads.items()))


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `tie_word_embeddings: false`, also in nested configs that have this entry.

    >>> untied_config({"text_config": {"tie_word_embeddings": True}})
    {'text_config': {'tie_word_embeddings': False}, 'tie_word_embeddings': False}
    """
    nested = {k: untied_config(v) for k, v in config.items() if isinstance(v, Mapping) and TIE in v}
    return {**config, **nested, TIE: False}
