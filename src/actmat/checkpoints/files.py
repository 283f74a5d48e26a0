"""Positional reads of a checkpoint's files from many threads; a file that changed since it was opened is refused.

File descriptors are opened when needed and a bounded number is kept, because ten experts of 150 shards are more
files than a process may open.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from actmat.checkpoints.base import FileIdentity
from actmat.errors import CheckpointError
from actmat.system import BINARY, read_at

KEEP_OPEN = 16
MAX_READ = 1 << 30
"""Bytes per system call: Linux stops at 2 GiB - 4 KiB, macOS refuses more than 2 GiB - 1."""

CHANGED = "Likely cause: another process writes to it. Fix: wait until it is complete, then run again."


def _state(status: os.stat_result) -> tuple[int, int, int, int]:
    """Properties of a file that must not change between reads. Not the ctime: making a hard link changes it."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _subject(tensor: str, label: str) -> str:
    return f"tensor {tensor!r} in {label}" if tensor else label


def file_identity(path: Path) -> FileIdentity:
    """Identity of a local file now.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return FileIdentity(str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class FileReader:
    """Files by label (the name in messages and specs), read at offsets; `KEEP_OPEN` idle descriptors are kept.

    The state of a file is recorded when it is first opened. Every read raises `CheckpointError` if the file is missing,
    unreadable, shorter than it was, or changed.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}  # descriptors, least recently used first
        self._users: Counter[int] = Counter()
        self._states: dict[str, tuple[int, int, int, int]] = {}
        self.closed = False

    def add(self, label: str, path: Path) -> None:
        """Register a file for reading."""
        with self._lock:
            self._files[label] = path

    def size(self, label: str) -> int:
        """Size of the file in bytes."""
        with self._borrow(label) as fd:
            return os.fstat(fd).st_size

    def read(self, label: str, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on, as a new object."""
        out = bytearray(length)
        self.read_into(label, offset, memoryview(out))
        return bytes(out)

    def read_into(self, label: str, offset: int, out: memoryview, *, tensor: str = "") -> None:
        """Fill `out` from `offset` on. `tensor` is named in errors."""
        fd = self._take(label)  # no context manager: this is called for every chunk of a merge
        try:
            done, total = 0, len(out)
            while done < total:
                count = read_at(fd, out[done : done + MAX_READ], offset + done)
                if count == 0:
                    raise CheckpointError(
                        f"{_subject(tensor, label)}: expected {total} bytes at {offset}, the file ended after {done}. "
                        f"{CHANGED}"
                    )
                done += count
            if _state(os.fstat(fd)) != self._states[label]:
                raise CheckpointError(f"{_subject(tensor, label)}: the file changed since it was opened. {CHANGED}")
        except OSError as error:
            raise CheckpointError(f"{_subject(tensor, label)}: reading failed: {error.strerror}") from error
        finally:
            self._give_back(fd)

    def prefetch(self, label: str, offset: int, length: int) -> None:
        """Ask the system to read ahead, where it supports that. Never fails."""
        if not hasattr(os, "posix_fadvise") or self.closed:
            return
        with suppress(OSError, CheckpointError, ValueError), self._borrow(label) as fd:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close idle descriptors now and borrowed ones when their reader is done."""
        with self._lock:
            self.closed = True
            self._trim(0)

    @contextmanager
    def _borrow(self, label: str) -> Iterator[int]:
        fd = self._take(label)
        try:
            yield fd
        finally:
            self._give_back(fd)

    def _take(self, label: str) -> int:
        with self._lock:
            if self.closed:
                raise ValueError(f"{label}: read from a checkpoint that is closed")
            fd = self._open.pop(label, None)
            self._open[label] = fd = self._open_file(label) if fd is None else fd  # now the most recently used
            self._users[fd] += 1
            return fd

    def _give_back(self, fd: int) -> None:
        with self._lock:
            self._users[fd] -= 1
            self._trim(0 if self.closed else KEEP_OPEN)

    def _trim(self, keep: int) -> None:
        for label, fd in list(self._open.items()):
            if len(self._open) <= keep:
                break
            if not self._users[fd]:
                os.close(fd)
                del self._open[label]

    def _open_file(self, label: str) -> int:
        path = self._files[label]
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
                raise CheckpointError(f"{label}: expected a file, found something else at {path}")
            fd = os.open(path, os.O_RDONLY | BINARY)
        except OSError as error:
            raise CheckpointError(f"{label}: cannot be opened at {path}: {error.strerror}") from error
        now = _state(os.fstat(fd))
        if self._states.setdefault(label, now) != now:
            os.close(fd)
            raise CheckpointError(f"{label}: the file changed since it was first opened. {CHANGED}")
        return fd
