"""The lock of the process that builds or renames an output, on a hidden file beside it.

`flock`; `msvcrt.locking` on Windows; on a system with neither, the file itself is the lock, which a killed process
leaves behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import IO

from actmat.errors import OutputError
from actmat.system import BINARY, NOFOLLOW, NONBLOCK, optional_module

__all__ = ["OutputLock"]

LOCK_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NOFOLLOW | NONBLOCK | BINARY

_FCNTL, _MSVCRT = optional_module("fcntl"), optional_module("msvcrt")
_LOCKS = _FCNTL is not None or _MSVCRT is not None

WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""Errors of file systems that offer no locks."""


class OutputLock:
    """Held by one process at a time; the system releases it when that process ends.

    Args:
        out: the output, for messages.
        path: the file that is locked.
    """

    def __init__(self, out: Path, path: Path) -> None:
        self.out = out
        self.path = path
        self._file: IO[bytes] | None = None

    @property
    def is_held(self) -> bool:
        """True if this process holds it."""
        return self._file is not None

    def take(self, *, required: bool = True) -> None:
        """Take the lock, or fail at once.

        Args:
            required: False goes on without a lock on a file system that has none; the caller is safe without it.

        Raises:
            OutputError: another process holds it.
            OSError: the file system offers no locks.
        """
        while self._file is None:
            try:
                file = os.fdopen(os.open(self.path, LOCK_FLAGS | (0 if _LOCKS else os.O_EXCL), 0o644), "ab")
            except FileExistsError:
                raise OutputError(
                    f"Another actmat is writing {self.out} right now, or was killed: this system has no locks, and "
                    f"{self.path} is there. If none runs, remove that file."
                ) from None
            try:
                _lock(file)
            except BlockingIOError:
                file.close()
                raise OutputError(
                    f"Another actmat is writing {self.out} right now (it holds {self.path}). Wait for it, or choose "
                    "another place with --out."
                ) from None
            except OSError as error:
                file.close()
                if required or error.errno not in WITHOUT_LOCKS:
                    raise
                self.path.unlink(missing_ok=True)
                return
            if _is_at(file, self.path):
                self._file = file
            else:  # its owner removed it between our opening and our locking
                file.close()

    def release(self) -> None:
        """Release the lock and remove its file. May be called twice."""
        if self._file is not None:
            with contextlib.suppress(PermissionError):  # Windows removes no open file; it stays, unlocked
                self.path.unlink(missing_ok=True)  # while locked: later it may be of another process
            self._file.close()
            self._file = None


def _lock(file: IO[bytes]) -> None:
    """Lock an open file.

    Raises:
        BlockingIOError: another process has it.
        OSError: the file system offers no locks.
    """
    if _FCNTL is not None:
        _FCNTL.flock(file, _FCNTL.LOCK_EX | _FCNTL.LOCK_NB)
    elif _MSVCRT is not None:
        file.seek(0)
        try:
            _MSVCRT.locking(file.fileno(), _MSVCRT.LK_NBLCK, 1)
        except PermissionError as error:  # held by another process
            raise BlockingIOError(*error.args) from None


def _is_at(file: IO[bytes], path: Path) -> bool:
    """True if `path` names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False
