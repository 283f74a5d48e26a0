"""The lock of the process that builds or renames an output: `flock` on a hidden file beside it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

from actmat.errors import OutputError

__all__ = ["OutputLock"]

LOCK_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

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
            file = os.fdopen(os.open(self.path, LOCK_FLAGS, 0o644), "ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
            self.path.unlink(missing_ok=True)  # while locked: later it may be of another process
            self._file.close()
            self._file = None


def _is_at(file: IO[bytes], path: Path) -> bool:
    """True if `path` names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False
