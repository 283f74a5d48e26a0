"""Bases of checkpoints that are read from others: what a view does not change, it passes on."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, FileIdentity, TensorSpec
from actmat.checkpoints.side_files import ModelFiles, SideFiles


class CheckpointView(Checkpoint):
    """The tensors of a stored checkpoint, which is closed with it, seen in another way.

    Args:
        inner: the stored checkpoint. Its location, folder, notes and unused tensors are those of the view; `specs` and
            `aliases` are the view's own, and its `handle`, where another process can open it.
    """

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.location, self.directory = inner.location, inner.directory
        self.notes, self.unused, self.models = inner.notes, inner.unused, inner.models

    @property
    def config(self) -> Mapping[str, Any] | None:
        """That of the stored checkpoint, as all below."""
        return self.inner.config

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of every weight file."""
        return self.inner.identity()

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Bytes of the tensor of this name."""
        self.inner.read_into(spec.name, start, out)

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on."""
        self.inner.prefetch(names)

    @property
    def buffer_bytes(self) -> int:
        """Most memory that a thread takes for reading ahead."""
        return self.inner.buffer_bytes

    def sources(self) -> tuple[ModelFiles, ...]:
        """Those of the stored checkpoint."""
        return self.inner.sources()

    def side_files(self) -> SideFiles:
        """Files beside the weights."""
        return self.inner.side_files()

    def fetch_sidecars(self) -> Path | None:
        """Local folder of config, tokenizer and processor files."""
        return self.inner.fetch_sidecars()

    def close(self) -> None:
        """Close the stored checkpoint."""
        self.inner.close()


class DelegatingCheckpoint(Checkpoint):
    """Tensors that are stored in other checkpoints, under names of their own there."""

    @abc.abstractmethod
    def origin(self, name: str) -> tuple[Checkpoint, str]:
        """The checkpoint that holds a tensor of `specs`, and its name there."""

    def scheme(self, name: str) -> str:
        """Of the checkpoint that holds it."""
        held, own = self.origin(name)
        return held.scheme(own)

    def stored_specs(self, name: str) -> tuple[TensorSpec, ...]:
        """Of the checkpoint that holds it, with its names."""
        held, own = self.origin(name)
        return held.stored_specs(own)

    def read(self, name: str) -> Tensor:
        """The whole tensor, from its checkpoint."""
        held, own = self.origin(self.find_spec(name).name)
        return held.read(own)

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Bytes of the tensor, from its checkpoint."""
        held, own = self.origin(spec.name)
        held.read_into(own, start, out)

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on."""
        for held, own in (self.origin(name) for name in names if name in self.specs):
            held.prefetch([own])
