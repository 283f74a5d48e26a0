"""Base classes of checkpoints that are views of others; unchanged properties are passed on."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, FileIdentity, TensorSpec


@dataclass(frozen=True, slots=True)
class ViewHandle:
    """Address of a view of one checkpoint: `make(inner, data)`; a `View`."""

    inner: CheckpointHandle
    make: Callable[[Checkpoint, Any], Checkpoint]
    data: Any

    def open(self, open_handle: Callable[[CheckpointHandle], Checkpoint]) -> Checkpoint:
        """The view of the checkpoint."""
        return self.make(open_handle(self.inner), self.data)


class CheckpointView(Checkpoint):
    """A view of the tensors of a stored checkpoint, which it closes.

    Args:
        inner: the stored checkpoint. Its location, folder and notes are those of the view; `specs` and
            `aliases` are the view's own, and its `handle`, where another process can open it.
    """

    inner: Checkpoint

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.location, self.directory = inner.location, inner.directory
        self.notes, self.absent, self.models = inner.notes, inner.absent, inner.models
        self.is_composed, self.written_sidecars = inner.is_composed, inner.written_sidecars

    def viewed(self, make: Callable[[Checkpoint, Any], Checkpoint], data: Any) -> CheckpointHandle:
        """Handle from which `make(inner, data)` opens the view again."""
        inner = self.inner.handle()
        return replace(inner, view=ViewHandle(inner, make, data))

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Config of the stored checkpoint."""
        return self.inner.config

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of every weight file."""
        return self.inner.identity()

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Bytes of the tensor of this name."""
        self.inner.read_into(spec.name, start, out)

    def close(self) -> None:
        """Close the stored checkpoint."""
        self.inner.close()


class DelegatingCheckpoint(Checkpoint):
    """Tensors that are stored in other checkpoints, where they may have other names."""

    @abc.abstractmethod
    def origin(self, name: str) -> tuple[Checkpoint, str]:
        """The checkpoint that holds a tensor of `specs`, and its name there."""

    def scheme(self, name: str) -> str:
        """Description of the layout, from the checkpoint that holds the tensor."""
        held, own = self.origin(name)
        return held.scheme(own)

    def stored_specs(self, name: str) -> tuple[TensorSpec, ...]:
        """Specs from the checkpoint that holds the tensor, with their names there."""
        held, own = self.origin(name)
        return held.stored_specs(own)

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Bytes of the tensor, from its checkpoint."""
        held, own = self.origin(spec.name)
        held.read_into(own, start, out)

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on."""
        for held, own in (self.origin(name) for name in names if name in self.specs):
            held.prefetch([own])
