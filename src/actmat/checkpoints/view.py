"""The base of checkpoints that are read from another one: what a view does not change, it passes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, FileIdentity
from actmat.checkpoints.side_files import SideFiles


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

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        return self.inner.read(name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of the tensor."""
        self.inner.read_into(name, start, out)

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on."""
        self.inner.prefetch(names)

    @property
    def buffer_bytes(self) -> int:
        """Most memory that a thread takes for reading ahead."""
        return self.inner.buffer_bytes

    def side_files(self) -> SideFiles:
        """Files beside the weights."""
        return self.inner.side_files()

    def fetch_sidecars(self) -> Path | None:
        """Local folder of config, tokenizer and processor files."""
        return self.inner.fetch_sidecars()

    def close(self) -> None:
        """Close the stored checkpoint."""
        self.inner.close()
