"""A checkpoint that counts the bytes read through it, to prove that a merge reads every tensor once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, FileIdentity

__all__ = ["CountingCheckpoint"]


class CountingCheckpoint(Checkpoint):
    """A wrapper that behaves like the wrapped checkpoint and counts.

    >>> import torch
    >>> from actmat.checkpoints.memory import MemoryCheckpoint
    >>> counting = CountingCheckpoint(MemoryCheckpoint({"w": torch.ones(2), "v": torch.ones(2)}))
    >>> _ = counting.read("w")
    >>> counting.read_other_than_once()
    {'v': 0.0}

    Attributes:
        calls: name -> number of `read` and `read_into` calls that succeeded.
        bytes_read: name -> bytes that they returned: exactly `specs[name].nbytes` for a tensor that was read once,
            whole or in chunks.
    """

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.location = inner.location
        self.directory = inner.directory
        self.specs = inner.specs
        self.aliases = inner.aliases
        self.calls: Counter[str] = Counter()
        self.bytes_read: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Config of the wrapped checkpoint."""
        return self.inner.config

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the wrapped checkpoint."""
        return self.inner.identity()

    def read(self, name: str) -> Tensor:
        """Read and count."""
        tensor = self.inner.read(name)
        self._count(name, self.specs[name].nbytes)
        return tensor

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Read and count."""
        self.inner.read_into(name, start, out)
        self._count(name, len(out))

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on; not counted."""
        self.inner.prefetch(names)

    def handle(self) -> CheckpointHandle:
        """Handle of the wrapped checkpoint; opened again, it does not count."""
        return self.inner.handle()

    def close(self) -> None:
        """Close the wrapped checkpoint; the counts stay."""
        self.inner.close()

    def read_other_than_once(self, names: Iterable[str] | None = None) -> dict[str, float]:
        """Name -> how many times its bytes were read, for the tensors (of `names`) where that is not once.

        Tensors without bytes are left out.
        """
        chosen = self.specs if names is None else names
        times = {name: self.bytes_read[name] / self.specs[name].nbytes for name in chosen if self.specs[name].nbytes}
        return {name: count for name, count in times.items() if count != 1}

    def _count(self, name: str, nbytes: int) -> None:
        with self._lock:
            self.calls[name] += 1
            self.bytes_read[name] += nbytes
