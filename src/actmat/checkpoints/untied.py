"""Checkpoints with tensors added: an output head that is stored tied to the token table, and marks of single files.

Marks are tensors of at most one entry, by which loaders of single files tell kinds of models apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, torch_dtype
from actmat.checkpoints.memory import MemoryCheckpoint
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
        return self.viewed(UntiedCheckpoint, self.heads)


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `tie_word_embeddings: false`, also in nested configs that have this entry.

    >>> untied_config({"text_config": {"tie_word_embeddings": True}})
    {'text_config': {'tie_word_embeddings': False}, 'tie_word_embeddings': False}
    """
    nested = {k: untied_config(v) for k, v in config.items() if isinstance(v, Mapping) and TIE in v}
    return {**config, **nested, TIE: False}


class MarkedCheckpoint(DelegatingCheckpoint, CheckpointView):
    """The tensors of a checkpoint and marks such as `v_pred`.

    Args:
        inner: the stored one, closed with this.
        marks: tensors that it lacks.
        notes: remarks for plans.
    """

    def __init__(self, inner: Checkpoint, marks: Mapping[str, Tensor], notes: Sequence[str] = ()) -> None:
        super().__init__(inner)
        self.notes = (*inner.notes, *notes)
        self._marks = MemoryCheckpoint(marks)
        self.specs = MappingProxyType({**inner.specs, **self._marks.specs})
        self.aliases = inner.aliases

    def origin(self, name: str) -> tuple[Checkpoint, str]:
        """The stored checkpoint, or the marks."""
        return (self._marks if name in self._marks.specs else self.inner), name

    def handle(self) -> CheckpointHandle:
        """Address of the stored checkpoint, with the marks."""
        marks = {n: (s.dtype, s.shape, self._marks.read(n).tolist()) for n, s in self._marks.specs.items()}
        return self.viewed(_marked, marks)


def _marked(inner: Checkpoint, marks: Mapping[str, tuple[str, tuple[int, ...], Any]]) -> MarkedCheckpoint:
    return MarkedCheckpoint(
        inner, {n: torch.tensor(v, dtype=torch_dtype(d)).reshape(shape) for n, (d, shape, v) in marks.items()}
    )


def with_marks(base: Checkpoint, experts: Mapping[str, Checkpoint]) -> Checkpoint:
    """The base with the marks that all experts hold alike and it lacks; unchanged for models with a config.

    Args:
        base: of a merge.
        experts: label -> a full checkpoint.
    """
    if base.config is not None or not experts:
        return base
    held = {
        label: {n: c.read(n) for n, s in c.specs.items() if s.numel <= 1 and n not in base.specs}
        for label, c in experts.items()
    }
    first, *others = held.values()
    marks = {n: t for n, t in first.items() if all(n in o and _alike(t, o[n]) for o in others)}
    notes = [f"lacks {_listed(marks)}, which all experts hold alike: written to the output"] if marks else []
    notes += [
        f"lacks {_listed(lost)}, which expert '{label}' holds and not all experts alike: not written. Loaders tell by "
        "such tensors how a model predicts (epsilon or v)"
        for label, own in held.items()
        if (lost := [n for n, t in own.items() if n not in marks and not t.numel()])
    ]
    return MarkedCheckpoint(base, marks, notes) if notes else base


def _listed(names: Sequence[str] | Mapping[str, Tensor]) -> str:
    return ", ".join(f"'{n}'" for n in names)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)
