"""Doors, and the search for cases that break the promise of one.

A door is a function that draws a case from hypothesis and gives it to one reader. The reader may succeed or raise a
`MergeError`. Anything else is a failure: another exception, more than a second, more than 300 MB of Python objects,
or a control character in the message.
"""

from __future__ import annotations

import math
import re
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from actmat.errors import MergeError

__all__ = [
    "DOORS",
    "MAX_MEMORY",
    "MAX_SECONDS",
    "BrokenPromise",
    "Case",
    "Door",
    "Result",
    "door",
    "guarded",
    "run_door",
]

BATCH = 100
MAX_SECONDS = 1.0
MAX_MEMORY = 300_000_000
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys; a newline parts the lines of a message."""

SEEDS = Path(__file__).parent / "seeds"
"""Cases that once failed, kept by hypothesis and tried first."""

Case = Callable[[st.DataObject], None]


@dataclass(frozen=True)
class Door:
    """A reader of foreign input."""

    name: str
    case: Case


@dataclass(frozen=True)
class Result:
    """Number of cases that a door took, the slowest in seconds, and the failure, if there is one."""

    name: str
    cases: int
    slowest: float
    failure: str = ""


class BrokenPromise(AssertionError):
    """A reader was too slow, took too much memory, or let a control character through."""


DOORS: dict[str, Door] = {}


def door(name: str) -> Callable[[Case], Case]:
    """Register a door under a name."""

    def register(case: Case) -> Case:
        DOORS[name] = Door(name, case)
        return case

    return register


def guarded(read: Callable[[], object]) -> float:
    """Seconds that a reader takes.

    Raises:
        BrokenPromise: too slow, too large, or a control character in its message.
        Exception: what the reader raised, unless it is a `MergeError`.
    """
    tracemalloc.start()
    began = time.process_time()  # of this process: other programs must not count
    message = ""
    try:
        read()
    except MergeError as error:
        message = str(error)
    finally:
        seconds = time.process_time() - began
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if seconds > MAX_SECONDS:
        raise BrokenPromise(f"{seconds:.1f} s, at most {MAX_SECONDS} are allowed")
    if peak > MAX_MEMORY:
        raise BrokenPromise(f"{peak} bytes, at most {MAX_MEMORY} are allowed")
    if found := CONTROL.search(message):
        raise BrokenPromise(f"the control character {found[0]!r} in {message[:300]!r}")
    return seconds


def run_door(name: str, *, cases: int, deadline: float = math.inf, seed: int = 0) -> Result:
    """Feed random cases to a door until one fails, their number is reached or the time (`time.monotonic`) is over."""
    count, slowest = 0, 0.0
    while count < cases and time.monotonic() < deadline:
        found = _batch(DOORS[name], min(BATCH, cases - count), seed)
        count, slowest, seed = count + found.cases, max(slowest, found.slowest), seed + 1
        if found.failure:
            return Result(name, count, slowest, found.failure)
    return Result(name, count, slowest)


def _batch(chosen: Door, cases: int, seed: int) -> Result:
    count, slowest = 0, 0.0

    @seeded(seed)
    @settings(
        max_examples=cases,
        deadline=None,
        database=DirectoryBasedExampleDatabase(SEEDS / chosen.name),
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(st.data())
    def search(data: st.DataObject) -> None:
        nonlocal count, slowest
        count += 1
        began = time.process_time()
        chosen.case(data)
        slowest = max(slowest, time.process_time() - began)

    try:
        search()
    except Exception as error:  # noqa: BLE001 - any exception of a reader is a finding
        notes = "\n".join(getattr(error, "__notes__", ()))
        return Result(chosen.name, count, slowest, f"{type(error).__name__}: {str(error)[:2000]}\n{notes}")
    return Result(chosen.name, count, slowest)
