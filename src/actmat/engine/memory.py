"""Memory: warm buffers to read into, and the budget that admits work."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["Budget", "Scratch", "available_memory"]


class Scratch:
    """Buffers of one worker, kept from piece to piece so that their pages stay warm.

    A buffer handed out under a key is overwritten by the next call with the same key.
    """

    def __init__(self) -> None:
        self._buffers: dict[object, Tensor] = {}

    def take(self, key: object, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D CPU tensor of `numel` entries, contents arbitrary."""
        nbytes = numel * dtype.itemsize
        held = self._buffers.get(key)
        if held is None or held.numel() < nbytes:
            held = self._buffers[key] = torch.empty(max(nbytes, 8), dtype=torch.uint8)
        return held[:nbytes].view(dtype)


class Budget:
    """Admits work as long as its estimated memory fits; an item larger than the budget runs alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used = 0
        self._change = threading.Condition()

    @contextlib.contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes` are free, keep them for the duration of the block."""
        with self._change:
            self._change.wait_for(lambda: self._used == 0 or self._used + nbytes <= self._total)
            self._used += nbytes
        try:
            yield
        finally:
            with self._change:
                self._used -= nbytes
                self._change.notify_all()


def available_memory() -> int:
    """Bytes of memory that could be used now without swapping: what the kernel says, within the cgroup's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as file:
        line = next(x for x in file if x.startswith("MemAvailable:"))
        available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = int(file.read())
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            available = min(available, limit - int(file.read()))
    return available
