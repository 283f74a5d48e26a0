"""An output that is one file: it appears whole or not at all, and one process makes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from actmat.checkpoints.writing.lock import OutputLock
from actmat.checkpoints.writing.staging import disk_errors, sibling
from actmat.errors import OutputError
from actmat.system import replace_file, sync_directory


@contextlib.contextmanager
def whole_file(out: Path, *, may_replace: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """A hidden file next to `out` to write to; it is renamed to `out` when the block ends, and removed on any error.

    Args:
        may_replace: returns True if an `out` that exists by then may be replaced.

    Raises:
        OutputError: another process writes `out`, it exists and may not be replaced, or writing failed.
    """
    lock, building = OutputLock(out, sibling(out, "lock")), sibling(out, "partial")
    with disk_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock.take()
        try:
            building.unlink(missing_ok=True)  # of a process that was killed here
            yield building
            if os.path.lexists(out) and not may_replace():  # another program was faster
                raise OutputError(f"{out} exists; choose another place, or remove it.")
            replace_file(building, out)
            sync_directory(out.parent)
        except BaseException:  # Ctrl-C too: nothing is left, and it is passed on
            building.unlink(missing_ok=True)
            raise
        finally:
            lock.release()
