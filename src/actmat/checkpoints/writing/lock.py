"""The lock of the process that builds or renames an output, on a hidden file next to it."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from filelock import FileLock, Timeout

from actmat.errors import OutputError

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
        # A lock that is the mere existence of a file would outlive a process that is killed on another machine.
        self._lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)

    @property
    def is_held(self) -> bool:
        """True if this process holds it."""
        return self._lock.is_locked

    def take(self, *, required: bool = True) -> None:
        """Take the lock, or fail at once.

        Args:
            required: False: continue without a lock on a file system that offers none.

        Raises:
            OutputError: another process holds it.
            OSError: the file system offers no locks.
        """
        while not self.is_held:
            try:
                self._lock.acquire()
            except Timeout:
                if os.path.lexists(self.path):  # else its owner removed it between our opening and our locking
                    raise OutputError(
                        f"Another actmat is writing {self.out} right now (it holds {self.path}). Wait for it, or "
                        "choose another place with --out."
                    ) from None
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT))  # or the error of a place that takes no files
            except OSError as error:
                if required or error.errno not in WITHOUT_LOCKS:
                    raise
                self.path.unlink(missing_ok=True)
                return

    def release(self) -> None:
        """Release the lock and remove its file. May be called twice."""
        if self.is_held:
            with contextlib.suppress(PermissionError):  # Windows removes no open file; it stays, unlocked
                self.path.unlink(missing_ok=True)  # while locked: later it may be of another process
            self._lock.release()
