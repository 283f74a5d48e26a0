"""Faults of one process: its n-th operation on the disk kills it, ends it, or fails."""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WRITES = ("pwrite", "fsync", "fdatasync", "rename", "ftruncate", "mkdir", "unlink", "open", "append", "copyfile")
READS = ("preadv", "pread")
HALF_A_FILE = 3000
"""Bytes of a file that still fit, about half of the smallest shard: writes across this end are cut."""
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EDQUOT": errno.EDQUOT}


@dataclass(frozen=True)
class Fault:
    """Fault at the `number`-th operation of one of the `names`: `kind` is kill, half, term, full, or one of `ERRORS`.

    `half`: a write is cut in half, and then the process is killed. `full`:
    from then on no file grows beyond `HALF_A_FILE`, by a limit of the system, which cuts writes as a full disk does.
    """

    kind: str
    names: tuple[str, ...]
    number: int


def install(fault: Fault | None) -> dict[str, int]:
    """Interpose the operations of this process; returns their counts, which go on."""
    counts = dict.fromkeys((*WRITES, *READS), 0)
    lock = threading.Lock()

    def interposed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with lock:
                counts[name] += 1
                due = fault is not None and name in fault.names and sum(counts[n] for n in fault.names) == fault.number
            if due and fault is not None:
                _strike(fault, name, real, arguments)
            return real(*arguments, **options)

        return call

    for name in ("pwrite", "fsync", "fdatasync", "rename", "ftruncate", "mkdir", "unlink", *READS):
        setattr(os, name, interposed(name, getattr(os, name)))
    shutil.copyfile = interposed("copyfile", shutil.copyfile)  # type: ignore[assignment]
    _interpose_files(interposed)
    return counts


def _interpose_files(interposed: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Interpose the opening of files to be written, and every line that is appended without a buffer."""
    real_open = io.open

    class Appended(io.FileIO):
        write = interposed("append", io.FileIO.write)

    opened = interposed("open", real_open)

    def opening(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
        if mode == "ab" and buffering == 0:
            return Appended(file, mode)
        return (opened if set(mode) & set("wax+") else real_open)(file, mode, buffering, *rest, **options)

    io.open = opening  # type: ignore[assignment]


def _strike(fault: Fault, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if fault.kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (HALF_A_FILE, resource.RLIM_INFINITY))
    elif fault.kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.kind in ERRORS:
        raise OSError(ERRORS[fault.kind], f"the fault of {name}")
    else:
        if fault.kind == "half" and name in ("pwrite", "append"):
            first, data, *rest = arguments
            real(first, data[: len(data) // 2], *rest)
        os.kill(os.getpid(), signal.SIGKILL)
