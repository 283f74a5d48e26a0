"""A checkpoint that counts what is read through it, to prove that a merge reads every tensor once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, FileIdentity

__all__ = ["CountingCheckpoint"]


class CountingCheckpoint(Checkpoint):
    """Wraps a checkpoint; behaves like it and counts.

    Attributes:
        calls: name -> number of `read` and `read_into` calls that succeeded.
        bytes_read: name -> bytes that they delivered. A tensor that was read once, whole or in chunks, has exactly
            `specs[name].nbytes`.
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
        """Pass the hint on; it counts for nothing."""
        self.inner.prefetch(names)

    def close(self) -> None:
        """Close the wrapped checkpoint; the counts stay."""
        self.inner.close()

    def read_other_than_once(self, names: Iterable[str] | None = None) -> dict[str, float]:
        """name -> how many times its bytes were read, of every tensor (of `names`) where that is not once.

        Tensors without bytes are left out: there is nothing to read of them.
        """
        chosen = self.specs if names is None else names
        times = {name: self.bytes_read[name] / self.specs[name].nbytes for name in chosen if self.specs[name].nbytes}
        return {name: count for name, count in times.items() if count != 1}

    def _count(self, name: str, nbytes: int) -> None:
        with self._lock:
            self.calls[name] += 1
            self.bytes_read[name] += nbytes
