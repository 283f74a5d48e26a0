"""One run: a merge is disturbed one to three times, the same command is given again, the bytes are compared."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from chaos.faults import ERRORS, READS, WRITES, Fault, install
from chaos.searches import make_search_inputs, search_contents
from chaos.sorts import (
    REPLACED,
    SORTS,
    Sort,
    command,
    contents,
    leftovers,
    make_inputs,
    prepare,
    untouched,
    weights,
)

KINDS = ("kill", "half", "term", "full", *ERRORS, "read", "clock", "rival")
"""kill: at an operation on the disk; half: after half a write; term: SIGTERM; full: files cannot grow; read: an error
of a read; clock: killed at a random moment; rival: two or three processes at once."""
STOPPED = {0, 1, 3, 128 + signal.SIGTERM, -signal.SIGKILL}
"""Exit codes of a disturbed merge."""


class Chaos:
    """Reference outputs, and how many operations each takes."""

    def __init__(self, root: Path, sorts: Sequence[str]) -> None:
        self.root = root
        make_inputs(root)
        if "tune" in {SORTS[label].verb for label in sorts}:
            make_search_inputs(root)
        self.expected: dict[str, dict[str, bytes]] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.seconds: dict[str, float] = {}
        code = self.wait(self._fork([*command(root, SORTS["model"], root / REPLACED), "-m", "ties"], root))
        assert code == 0, self.errors(root)
        self.replaced = contents(root / REPLACED)
        self.inputs = untouched(root)
        for label in sorts:
            place = root / "run"  # that of all runs: a search names it in its recipe
            began = time.monotonic()
            code = self.wait(self.start(SORTS[label], place))
            self.seconds[label] = time.monotonic() - began
            assert code == 0, self.errors(place)
            self.expected[label] = made = self.found(SORTS[label], place)
            first = self.expected.get(label.partition(",")[0], made)
            assert weights(made) == weights(first), f"{label} differs from the merge on the host without any fault"
            self.counts[label] = json.loads((place / "counts.json").read_text())
            shutil.rmtree(place)

    @staticmethod
    def found(sort: Sort, place: Path) -> dict[str, bytes]:
        """Files that a command made: its output, and of a search its work folder."""
        return contents(place / "out") | (search_contents(place / "out") if sort.verb == "tune" else {})

    def start(self, sort: Sort, place: Path, fault: Fault | None = None) -> int:
        """Fork a merge into `place / "out"`; returns the process."""
        place.mkdir(exist_ok=True)
        if not (place / "stderr.txt").exists():  # the first process there
            prepare(self.root, sort, place / "out")
        return self._fork(command(self.root, sort, place / "out"), place, fault)

    def _fork(self, argv: list[str], place: Path, fault: Fault | None = None) -> int:
        process = os.fork()
        if process == 0:
            _child(argv, place, fault)
        (place / "stderr.txt").touch()
        return process

    @staticmethod
    def wait(process: int) -> int:
        """Exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    @staticmethod
    def errors(place: Path) -> str:
        """Text that the last process wrote to stderr."""
        return (place / "stderr.txt").read_text()

    def disturb(self, label: str, kind: str, place: Path, rng: random.Random) -> tuple[str, set[int]]:
        """Run a merge under one fault; returns the fault in words and the exit codes."""
        sort = SORTS[label]
        if kind == "rival":
            rivals = [self.start(sort, place) for _ in range(rng.choice((2, 3)))]
            return f"{len(rivals)} processes", {self.wait(p) for p in rivals}
        if kind == "clock":
            moment = rng.random() * self.seconds[label]
            process = self.start(sort, place)
            time.sleep(moment)
            os.kill(process, signal.SIGKILL)
            return f"killed after {moment:.3f} s", {self.wait(process)}
        names = READS if kind == "read" else WRITES
        number = rng.randint(1, sum(self.counts[label][n] for n in names))
        fault = Fault("EIO" if kind == "read" else kind, names, number)
        return f"{fault.kind} at operation {number} of {names[0]}, ...", {self.wait(self.start(sort, place, fault))}

    def run(self, label: str, kind: str, rng: random.Random) -> tuple[int, list[str]]:
        """Disturb a merge once to three times, give the same command again; number of faults, and what is wrong."""
        place = self.root / "run"
        problems, story = [], []
        for _ in range(rng.randint(1, 3)):
            said, codes = self.disturb(label, kind, place, rng)
            story.append(f"{said}: {sorted(codes)}")
            if not codes <= STOPPED:
                problems.append(f"exit codes {sorted(codes)}:\n{self.errors(place)}")
            for name, data in self.half_finished(SORTS[label], place).items():
                problems.append(f"{name} is there with other bytes ({len(data)})")
        code = self.wait(self.start(SORTS[label], place))
        is_finished = SORTS[label].verb == "tune" and code == 1 and (place / "out").exists()
        if code != 0 and not is_finished:
            problems.append(f"the same command gave {code}:\n{self.errors(place)}")
        elif self.found(SORTS[label], place) != self.expected[label]:
            made = self.found(SORTS[label], place)
            differing = sorted(n for n in made | self.expected[label] if made.get(n) != self.expected[label].get(n))
            problems.append(f"other bytes in the end: {', '.join(differing)}")
        if untouched(self.root) != self.inputs:
            problems.append("an input is changed")
        if left := leftovers(place):
            problems.append(f"left: {left}")
        shutil.rmtree(place)
        return len(story), [f"{label}, {'; '.join(story)}: {p}" for p in problems]

    def half_finished(self, sort: Sort, place: Path) -> dict[str, bytes]:
        """Files under a final name that are not as they should be, nor all those of the output to be replaced."""
        if not (place / "out").exists():
            return {}
        try:
            found = self.found(sort, place)
            if sort.verb == "tune":  # of the work folder, only the report says that it is complete
                found = {n: d for n, d in found.items() if not n.startswith("search/") or n == "search/tune.json"}
        except ValueError as error:  # JSON that was cut
            return {"a manifest or a report": str(error).encode()}
        if sort.replaces and found == self.replaced:
            return {}
        return {n: d for n, d in found.items() if self.expected[sort.name].get(n) != d}


def _child(argv: list[str], place: Path, fault: Fault | None) -> None:
    """Run `actmat` in this process; never returns."""
    code = 70
    try:
        handle = os.open(place / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 2)
        tqdm.set_lock(threading.RLock())  # its own is shared by all forked processes, and held by those that are killed
        torch.set_num_threads(1)  # makes torch's pool anew, which is lost in a fork, before several threads want it
        counts = install(fault)
        sys.argv = ["actmat", *argv]
        from actmat.cli.main import main

        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
        if code == 0 and fault is None:
            (place / "counts.json").write_text(json.dumps(counts))
    except Exception:  # noqa: BLE001 - the process that forked must not go on twice
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
