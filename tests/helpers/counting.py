"""Tensors that count the bytes read through them, to prove that a merge reads every tensor once."""

import threading
from collections import Counter
from collections.abc import Iterable

from actmat.checkpoints.base import Tensors, TensorsHandle, TensorSpec, View


class CountingTensors(View):
    """A wrapper that behaves like the wrapped tensors and counts.

    >>> import torch
    >>> from actmat.checkpoints.memory import MemoryTensors
    >>> counting = CountingTensors(MemoryTensors({"w": torch.ones(2), "v": torch.ones(2)}))
    >>> _ = counting.read("w")
    >>> counting.read_other_than_once()
    {'v': 0.0}

    Attributes:
        calls: name -> number of `read` and `read_into` calls that succeeded.
        bytes_read: name -> bytes that they returned: exactly `specs[name].nbytes` for a tensor that was read once,
            whole or in chunks.
    """

    def __init__(self, inner: Tensors) -> None:
        super().__init__([inner])
        self.inner, self.specs, self.aliases = inner, inner.specs, inner.aliases
        self.calls: Counter[str] = Counter()
        self.bytes_read: Counter[str] = Counter()
        self._lock = threading.Lock()

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Read and count."""
        self.inner.read_into(spec.name, start, out)
        with self._lock:
            self.calls[spec.name] += 1
            self.bytes_read[spec.name] += len(out)

    def handle(self) -> TensorsHandle:
        """Handle of the wrapped tensors; opened again, it does not count."""
        return self.inner.handle()

    def read_other_than_once(self, names: Iterable[str] | None = None) -> dict[str, float]:
        """Name -> how many times its bytes were read, for the tensors (of `names`) where that is not once.

        Tensors without bytes are left out.
        """
        chosen = self.specs if names is None else names
        times = {name: self.bytes_read[name] / self.specs[name].nbytes for name in chosen if self.specs[name].nbytes}
        return {name: count for name, count in times.items() if count != 1}
