"""Many cases of one door in a forked process, under limits that even a crash or an endless loop cannot escape."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import pickle
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fuzz.harness import DOORS, MAX_BYTES, Door, Files, Memory, case_of, guarded, signature

KILLED_AFTER = 20.0
"""Seconds of processor time after which a case is killed."""
STUCK_AFTER = 120.0
"""Seconds of the clock after which a case is killed: it waits for something."""
ADDRESS_SPACE = 4 * MAX_BYTES
"""Bytes that a case can allocate before it fails."""
MOST_FAILURES = 10
"""Failures of one batch after which it ends."""


@dataclass
class Batch:
    """What a number of cases took, and the failures: number of the case, what tells it from others, and in words."""

    cases: int = 0
    slowest: float = 0.0
    memory: int = 0
    failures: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, other: Batch) -> None:
        """Take in a later batch."""
        self.cases += other.cases
        self.slowest, self.memory = max(self.slowest, other.slowest), max(self.memory, other.memory)
        self.failures += other.failures


def run_batch(name: str, seed: int, first: int, count: int, *, deadline: float = float("inf")) -> Batch:
    """Cases `first` to `first + count` of a door, fewer if the time (`time.monotonic`) is over."""
    chosen = DOORS[name]
    return _forked(chosen, ((k, case_of(chosen, seed, k)) for k in range(first, first + count)), deadline)


def run_files(name: str, cases: Sequence[Files]) -> Batch:
    """Given cases of a door, numbered from 0."""
    return _forked(DOORS[name], enumerate(cases), float("inf"))


def _forked(chosen: Door, cases: Iterable[tuple[int, Files]], deadline: float) -> Batch:
    """Run cases in a child; a case that kills it is a failure."""
    current = mmap.mmap(-1, 16)  # shared: the number of the case at work, and how many there were
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(chosen, cases, deadline, current, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if told and code == 0:
        batch: Batch = pickle.loads(told)
    else:
        at, done = (int.from_bytes(current[i : i + 8], "little") for i in (0, 8))
        why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        batch = Batch(done, failures=[(at, why, f"the process ended: {why}")])
    return batch


def _child(chosen: Door, cases: Iterable[tuple[int, Files]], deadline: float, current: mmap.mmap, pipe: int) -> None:
    code = 70
    try:
        gc.freeze()
        faulthandler.disable()  # the parent says what ended a case
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler of the parent would not run in a case that hangs
        torch.set_num_threads(1)  # threads of the parent do not exist in a fork, which would wait for them
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("ignore")  # of torch, about odd pickles
        memory, batch = Memory(), Batch()
        size = os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE, size + ADDRESS_SPACE))
        for number, files in cases:
            if time.monotonic() > deadline or len(batch.failures) >= MOST_FAILURES:
                break
            batch.cases += 1
            current[:16] = number.to_bytes(8, "little") + batch.cases.to_bytes(8, "little")
            signal.setitimer(signal.ITIMER_PROF, KILLED_AFTER)
            signal.setitimer(signal.ITIMER_REAL, STUCK_AFTER)
            _one(chosen, number, files, memory, batch)
        with os.fdopen(pipe, "wb") as out:
            pickle.dump(batch, out)
        code = 0
    except BaseException:  # noqa: BLE001 - the process that forked must not go on twice
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _one(chosen: Door, number: int, files: Files, memory: Memory, batch: Batch) -> None:
    try:
        seconds, peak = guarded(lambda: chosen.read(files), memory)
    except Exception as error:  # noqa: BLE001 - any exception of a reader is a finding
        said = "".join(traceback.format_exception(error))[-3000:]
        batch.failures.append((number, signature(error), said))
        gc.collect()
    else:
        batch.slowest, batch.memory = max(batch.slowest, seconds), max(batch.memory, peak)
