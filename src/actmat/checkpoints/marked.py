"""A checkpoint with tensors of at most one entry added, by which loaders of single files tell kinds of models apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, torch_dtype
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.view import CheckpointView, DelegatingCheckpoint

Mark = tuple[str, str, tuple[int, ...], str]
"""Name, dtype, shape and hexadecimal bytes of a tensor."""


class MarkedCheckpoint(DelegatingCheckpoint, CheckpointView):
    """The tensors of a checkpoint and marks such as `v_pred`.

    Args:
        inner: the stored one, closed with this.
        marks: tensors that it lacks.
        notes: remarks for plans.
    """

    def __init__(self, inner: Checkpoint, marks: Mapping[str, Tensor], notes: Sequence[str] = ()) -> None:
        super().__init__(inner)
        self.is_composed, self.written_sidecars = inner.is_composed, inner.written_sidecars
        self.notes = (*inner.notes, *notes)
        self._marks = MemoryCheckpoint(marks)
        self.specs = MappingProxyType({**inner.specs, **self._marks.specs})
        self.aliases = inner.aliases

    def origin(self, name: str) -> tuple[Checkpoint, str]:
        """The stored checkpoint, or the marks."""
        return (self._marks if name in self._marks.specs else self.inner), name

    def handle(self) -> CheckpointHandle:
        """Address of the stored checkpoint, with the marks."""
        tensors = {n: (s, self._marks.read(n)) for n, s in self._marks.specs.items()}
        marks = tuple((n, s.dtype, s.shape, raw_bytes(t).hex()) for n, (s, t) in tensors.items())
        return replace(self.inner.handle(), marks=marks)


def read_marks(marks: Sequence[Mark]) -> dict[str, Tensor]:
    """The tensors of a handle."""
    out = {}
    for name, dtype, shape, text in marks:
        out[name] = torch.empty(tuple(shape), dtype=torch_dtype(dtype))
        raw_bytes(out[name])[:] = bytes.fromhex(text)
    return out


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
