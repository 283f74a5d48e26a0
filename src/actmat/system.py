"""Calls that not every operating system has, each with a substitute.

Tested on Linux only. Tests remove these calls and imitate those of other systems; nothing was run on macOS and
Windows.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BINARY: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags of every file that is opened: bytes as they are (Windows), not for child processes."""
NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
DSYNC: int = getattr(os, "O_DSYNC", getattr(os, "O_SYNC", 0))

UNKNOWN_MEMORY = 2 << 30
"""Bytes of memory that are assumed to be free if no call tells; --max-memory overrides it."""

WINDOWS = os.name == "nt"

NOT_ON_WINDOWS = re.compile(
    r'[<>:"|?*\\]|[. ]$|^(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])\s*(\.|$)', re.IGNORECASE
)
"""Names that are not files on Windows: a drive or a stream (`:`), a device with any suffix, and an end that is cut."""

BUSY_WAITS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds between attempts at a rename on Windows, where a virus scanner holds new files open for a moment."""

_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM})
"""Errors of file systems (network, FUSE) that sync no folders."""

_position = threading.Lock()
"""Held while a file's position is moved, on systems without positional reads."""


def optional_module(name: str) -> Any:
    """A module of the standard library, or None on a system without it."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_at(handle: int, out: memoryview, offset: int) -> int:
    """Fill the start of `out` with bytes of a file from `offset` on; returns their number, 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [out], offset)
    if hasattr(os, "pread"):
        data = os.pread(handle, len(out), offset)
    else:
        with _position:
            os.lseek(handle, offset, os.SEEK_SET)
            data = os.read(handle, len(out))
    out[: len(data)] = data
    return len(data)


def write_at(handle: int, data: memoryview, offset: int) -> int:
    """Write the start of `data` to a file at `offset`; returns the number of bytes written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(handle, data, offset)
    with _position:
        os.lseek(handle, offset, os.SEEK_SET)
        return os.write(handle, data)


def sync_data(handle: int) -> None:
    """Wait until a file's bytes are on the disk."""
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(handle)


def sync_file(handle: int) -> None:
    """Wait until a file is on the disk; on macOS also for the disk's own cache, where the file system does that."""
    fcntl = optional_module("fcntl")
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


def sync_directory(path: Path) -> None:
    """Wait until the names in a folder are on the disk, on systems and file systems that do this for a folder.

    Windows opens no folders, and orders renames itself.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)


def is_file_name(name: str) -> bool:
    """False for a name without slashes that this system takes for something else than a file in a folder."""
    return not WINDOWS or NOT_ON_WINDOWS.search(name) is None


def replace_file(source: Path, target: Path) -> None:
    """Rename a file, replacing an existing one."""
    _patiently(lambda: os.replace(source, target))


def rename_folder(source: Path, target: Path) -> None:
    """Rename a folder to a name that is free, or that an empty folder has."""
    try:
        _patiently(lambda: os.rename(source, target))
    except FileExistsError:  # Windows replaces no folder
        target.rmdir()
        _patiently(lambda: os.rename(source, target))


def _patiently(rename: Callable[[], None]) -> None:
    """Rename; on Windows, retry while another program has a file open."""
    for wait in BUSY_WAITS if WINDOWS else ():
        try:
            return rename()
        except PermissionError:
            time.sleep(wait)
    return rename()


def temporary_folder(kind: str) -> tuple[Path, Callable[[], None]]:
    """A new folder for temporary files, and what removes it; those of its kind that killed processes left are removed.

    Each is locked by its process; one that changed in the last minute may have no lock yet.
    """
    for left in Path(tempfile.gettempdir()).glob(f"actmat-{kind}.*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as locks:
            if time.time() - left.lstat().st_mtime > 60:
                _lock(left, locks)
                shutil.rmtree(left, ignore_errors=True)
    held = contextlib.ExitStack()
    folder = Path(tempfile.mkdtemp(prefix=f"actmat-{kind}."))
    with contextlib.suppress(OSError):
        _lock(folder, held)
    held.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder, held.close


def _lock(folder: Path, locks: contextlib.ExitStack) -> None:
    """Lock a folder; OSError if another process holds it, and on systems and file systems without such locks."""
    if (fcntl := optional_module("fcntl")) is None:
        raise OSError(errno.ENOTSUP, "no locks")
    handle = os.open(folder, os.O_RDONLY | NOFOLLOW)
    locks.callback(os.close, handle)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def stored_bytes(status: os.stat_result) -> int:
    """Bytes that a file takes on the disk; its size if the system does not say."""
    blocks: int | None = getattr(status, "st_blocks", None)
    return status.st_size if blocks is None else blocks * 512


def free_memory() -> int:
    """Bytes of memory that are free, before caches are released and limits of containers counted.

    Without a call that tells: half of the machine's memory, or `UNKNOWN_MEMORY`.
    """
    status = _windows_memory()
    if status is not None:
        return int(status.free)
    return _pages("SC_AVPHYS_PAGES") or _pages("SC_PHYS_PAGES") // 2 or UNKNOWN_MEMORY


def total_memory() -> int:
    """Bytes of memory of the machine; `UNKNOWN_MEMORY` without a call that tells."""
    status = _windows_memory()
    return _pages("SC_PHYS_PAGES") or (UNKNOWN_MEMORY if status is None else int(status.total))


def _pages(name: str) -> int:
    """Bytes of the pages that the system states under a name; 0 if it states none."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        pages, size = os.sysconf(name), os.sysconf("SC_PAGE_SIZE")
        return int(pages) * int(size)
    return 0


class _MemoryStatus(ctypes.Structure):
    """`MEMORYSTATUSEX` of Windows."""

    _fields_ = (
        ("length", ctypes.c_ulong),
        ("load", ctypes.c_ulong),
        *(
            (name, ctypes.c_ulonglong)
            for name in ("total", "free", "page_total", "page_free", "virtual", "virtual_free")
        ),
        ("extended", ctypes.c_ulonglong),
    )


def _windows_memory() -> _MemoryStatus | None:
    """The memory as Windows states it; None on other systems."""
    windows = getattr(ctypes, "windll", None)
    if windows is None:
        return None
    status = _MemoryStatus()
    status.length = ctypes.sizeof(status)
    windows.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return status
