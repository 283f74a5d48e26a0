"""Memory: warm buffers to read into, memory for whole tensors, and the budget that admits work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from actmat.system import free_memory

CGROUP = Path("/sys/fs/cgroup")
"""Folder of the group of processes whose memory a container limits (version 2)."""

ALIGNMENT = 64
"""Alignment in bytes of a new tensor of torch's CPU allocator; the last bits of a BLAS may depend on it."""


Use = Literal["base", "expert", "wide_base", "merged", "cast", "stored", "rows", "total"] | int
"""Use of a warm buffer.

base, expert        a chunk as stored
wide_base           a chunk of the base in the compute dtype
merged, cast        a chunk of the output, in the compute dtype and in the output's
stored, rows, total chunks of all inputs as stored, as rows of one matrix, and their sum (`engine.deltas`)
t                   a chunk of the delta of expert `t`
"""


class Scratch:
    """Buffers of one worker, kept from chunk to chunk so that their pages stay warm.

    Attributes:
        room: memory for whole tensors.
    """

    def __init__(self, *, keep: int = 0) -> None:
        self._bytes: dict[Use, Tensor] = {}
        self._views: dict[Use, Tensor] = {}
        self.room = Room(keep=keep)

    def take(self, use: Use, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D CPU tensor of `numel` entries, contents arbitrary; the next call for this use overwrites it."""
        view = self._views.get(use)
        if view is not None and view.numel() == numel and view.dtype == dtype:
            return view  # every call of torch, even for a view, may hand the interpreter to another worker
        nbytes = numel * dtype.itemsize
        if use not in self._bytes or self._bytes[use].numel() < nbytes:
            self._bytes[use] = torch.empty(max(nbytes, 8), dtype=torch.uint8)
        self._views[use] = self._bytes[use][:nbytes].view(dtype)
        return self._views[use]


class Room:
    """Memory of one worker for whole tensors: one block, kept mapped from tensor to tensor.

    Fresh pages are cleared by the kernel, which takes longer than an elementwise method does with them. Without
    `opened`, or beyond the size given there, buffers are plain new tensors.

    Args:
        keep: bytes that this worker may use at any time, its block and all else that a tensor takes; where a tensor
            would take more on top of a block of an earlier one, that block is released first. 0 keeps nothing.
    """

    def __init__(self, *, keep: int = 0) -> None:
        self.keep = keep
        self._block: Tensor | None = None
        self._used = 0

    @staticmethod
    def bytes_for(*buffers: tuple[int, int]) -> int:
        """Bytes of a block that holds buffers of (bytes per entry, entries)."""
        return sum(_aligned(width * numel) for width, numel in buffers)

    @contextlib.contextmanager
    def opened(self, nbytes: int, elsewhere: int) -> Iterator[None]:
        """Room of `nbytes` for one tensor, which takes `elsewhere` bytes outside of it."""
        held = 0 if self._block is None else self._block.numel()
        if max(held, nbytes) + elsewhere > self.keep or held < nbytes:
            self._block = None
        if self._block is None and nbytes:
            self._block = torch.empty(nbytes, dtype=torch.uint8)
        self._used = 0
        try:
            yield
        finally:
            if self._block is not None and self._block.numel() > self.keep:
                self._block = None

    def restart(self) -> None:
        """The next buffers overwrite those handed out so far."""
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D CPU tensor of `numel` entries, contents arbitrary, valid until `restart`."""
        nbytes = numel * dtype.itemsize
        start, stop = self._used, self._used + nbytes
        if self._block is None or stop > self._block.numel():
            return torch.empty(numel, dtype=dtype)
        self._used += _aligned(nbytes)
        return self._block[start:stop].view(dtype)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class MemoryBudget:
    """Admits work as long as its estimated memory fits; an item larger than the budget runs alone."""

    def __init__(self, total: float) -> None:
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
    """Bytes of memory that could be used now without swapping: what the kernel says, within the cgroup's limit.

    Pages of files that were read count as used by a cgroup, and are free for whoever needs them.
    """
    available = free_memory()
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as file:
        available = 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit, used = (int((CGROUP / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
        parts = dict(line.split() for line in (CGROUP / "memory.stat").read_text("ascii").splitlines())
        cached = int(parts["active_file"]) + int(parts["inactive_file"])  # pages of files: given back on demand
        available = min(available, limit - used + cached)
    return available
