"""Doors, and what a case may cost.

A door draws a case, a few files, from a random generator and gives it to one reader. The reader may succeed or raise a
`MergeError`. Anything else breaks its promise: another exception, more than a second of processor time, more than
300 MB, or a control character in its message or in what it returns as shown to a user.

Cases are cheap, hundreds to thousands per second, because they run in one forked process (`fuzz.worker`). Its memory is
that of the process, so tensors of torch and buffers of C libraries count: the largest resident set during the case
(`VmHWM`, reset before it) less that before it, and the growth of the address space (`VmPeak`), which also counts what was
allocated and never touched. `RLIMIT_AS` stops what is larger still; an error that it causes is a failure even if the
reader turns it into a `MergeError`.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from actmat.errors import MergeError, is_memory_error

MAX_SECONDS = 1.0
"""Processor time of one case."""
MAX_BYTES = 300_000_000
"""Memory of one case."""
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys; a newline parts the lines of a message."""
SEEDS = Path(__file__).parent / "seeds"
"""Cases that once broke a promise, as files: `DOOR/CASE/FILE`."""
CAUSES = 20
"""Longest chain of errors that is followed."""

Files = Mapping[str, bytes]
"""Name -> content of the files of a case."""


@dataclass(frozen=True)
class Door:
    """A reader of foreign input.

    Args:
        name: of the inputs it reads.
        draw: a case.
        read: gives it to the reader; returns what is shown to a user, if anything is.
    """

    name: str
    draw: Callable[[random.Random], Files]
    read: Callable[[Files], str | None]


class BrokenPromise(AssertionError):
    """A reader was too slow, took too much memory, or let a control character through."""


DOORS: dict[str, Door] = {}


def door(name: str, draw: Callable[[random.Random], Files], read: Callable[[Files], str | None]) -> None:
    """Register a door under a name."""
    assert name not in DOORS
    DOORS[name] = Door(name, draw, read)


def case_of(chosen: Door, seed: int, number: int) -> Files:
    """The case with a number: the same whenever it is drawn."""
    return chosen.draw(random.Random(f"{seed}/{chosen.name}/{number}"))


class Memory:
    """Memory of this process, from the kernel's counts (Linux)."""

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY)
        self._before = self._values()

    def _values(self) -> tuple[int, int, int, int]:
        """`VmPeak`, `VmSize`, `VmHWM` and `VmRSS` in bytes."""
        text = os.pread(self._status, 4096, 0)
        peak, size, high, resident = (
            1024 * int(text[text.index(key) + len(key) :].split(None, 1)[0])
            for key in (b"VmPeak:", b"VmSize:", b"VmHWM:", b"VmRSS:")
        )
        return peak, size, high, resident

    def start(self) -> None:
        """Begin to measure."""
        os.write(self._reset, b"5")
        self._before = self._values()

    def peak(self) -> int:
        """Most bytes since `start`: resident, or new in the address space."""
        peak, _, high, _ = self._values()
        old_peak, size, _, resident = self._before
        return max(high - resident, peak - size if peak > old_peak else 0)


def guarded(read: Callable[[], str | None], memory: Memory) -> tuple[float, int]:
    """Seconds and bytes that a reader takes.

    Raises:
        BrokenPromise: too slow, too large, or a control character in what it says.
        Exception: what the reader raised, unless it is a `MergeError`.
    """
    memory.start()
    began = time.process_time()  # of this process: other programs must not count
    shown = ""
    try:
        shown = read() or ""
    except MergeError as error:
        shown = str(error)
        if _is_of_memory(error):
            raise BrokenPromise(f"an allocation that failed became {shown[:200]!r}") from error
    seconds, peak = time.process_time() - began, memory.peak()
    if seconds > MAX_SECONDS:
        raise BrokenPromise(f"{seconds:.1f} s, at most {MAX_SECONDS} are allowed; {shown[:200]!r}")
    if peak > MAX_BYTES:
        raise BrokenPromise(f"{peak} bytes, at most {MAX_BYTES} are allowed; {shown[:200]!r}")
    if found := CONTROL.search(shown):
        raise BrokenPromise(f"the control character {found[0]!r} in {shown[max(0, found.start() - 200) :][:400]!r}")
    return seconds, peak


def _is_of_memory(error: BaseException) -> bool:
    """True if too little memory is among the causes."""
    cause: BaseException | None = error
    for _ in range(CAUSES):
        if cause is None:
            return False
        if is_memory_error(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def signature(error: BaseException) -> str:
    """What tells one defect from another: the type and the last line of actmat that it went through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}actmat{os.sep}" in f.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    words = str(error).split()[1:4] if isinstance(error, BrokenPromise) else []
    return " ".join([type(error).__name__, place, *words])


def keep_case(name: str, files: Files) -> Path:
    """Write a case to the folder of cases that are tried first."""
    digest = hashlib.sha256(b"\0".join(k.encode() + b"\0" + v for k, v in sorted(files.items()))).hexdigest()[:12]
    folder = SEEDS / name.replace(" ", "_") / digest
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


def kept_cases(name: str) -> Iterator[tuple[str, Files]]:
    """Cases of a door that once broke a promise, by their names."""
    folder = SEEDS / name.replace(" ", "_")
    for case in sorted(folder.iterdir()) if folder.is_dir() else ():
        yield case.name, {p.name: p.read_bytes() for p in sorted(case.iterdir())}
