"""`python -m chaos --runs N`: disturb merges at random, give the same command again, compare the bytes.

Every run forks processes in which all is imported. Run k of a seed is the same fault every time, except for kills at a
moment of the clock and for rivals. The exit code is 1 if any run ended with other bytes, a half-finished output, a
leftover, or an exit code that is not documented.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from chaos.faults import ERRORS, READS, WRITES, Fault, install
from chaos.sorts import SORTS, command, contents, leftovers, make_inputs

KINDS = ("kill", "half", "term", *ERRORS, "read", "clock", "rival")
STOPPED = {0, 1, 3, 128 + signal.SIGTERM, -signal.SIGKILL}
"""Exit codes of a disturbed merge."""


class Chaos:
    """Reference outputs, and how many operations each takes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        make_inputs(root)
        self.expected: dict[str, dict[str, bytes]] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.seconds: dict[str, float] = {}
        for sort in SORTS:
            place = root / f"reference {sort}"
            began = time.monotonic()
            code = self.wait(self.start(sort, place))
            self.seconds[sort] = time.monotonic() - began
            assert code == 0, self.errors(place)
            self.expected[sort] = contents(place / "out")
            self.counts[sort] = json.loads((place / "counts.json").read_text())

    def start(self, sort: str, place: Path, fault: Fault | None = None) -> int:
        """Fork a merge into `place / "out"`; returns the process."""
        place.mkdir(exist_ok=True)
        process = os.fork()
        if process == 0:
            _child(command(self.root, sort, place / "out"), place, fault)
        return process

    @staticmethod
    def wait(process: int) -> int:
        """Exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    @staticmethod
    def errors(place: Path) -> str:
        """Text that the last process wrote to stderr."""
        return (place / "stderr.txt").read_text()

    def disturb(self, sort: str, kind: str, place: Path, rng: random.Random) -> tuple[str, set[int]]:
        """Run a merge under one fault; returns the fault in words and the exit codes."""
        if kind == "rival":
            rivals = [self.start(sort, place) for _ in range(rng.choice((2, 3)))]
            return f"{len(rivals)} processes", {self.wait(p) for p in rivals}
        if kind == "clock":
            moment = rng.random() * self.seconds[sort]
            process = self.start(sort, place)
            time.sleep(moment)
            os.kill(process, signal.SIGKILL)
            return f"killed after {moment:.3f} s", {self.wait(process)}
        names = READS if kind == "read" else WRITES
        number = rng.randint(1, sum(self.counts[sort][n] for n in names))
        fault = Fault("EIO" if kind == "read" else kind, names, number)
        return f"{fault.kind} at operation {number} of {names[0]}, ...", {self.wait(self.start(sort, place, fault))}

    def run(self, sort: str, kind: str, rng: random.Random) -> list[str]:
        """Disturb a merge once to three times, give the same command again; returns what is wrong."""
        place = self.root / "run"
        problems, story = [], []
        for _ in range(rng.randint(1, 3)):
            said, codes = self.disturb(sort, kind, place, rng)
            story.append(f"{said}: {sorted(codes)}")
            if not codes <= STOPPED:
                problems.append(f"exit codes {sorted(codes)}:\n{self.errors(place)}")
            for name, data in self.half_finished(sort, place).items():
                problems.append(f"{name} is there with other bytes ({len(data)})")
        code = self.wait(self.start(sort, place))
        if code != 0:
            problems.append(f"the same command gave {code}:\n{self.errors(place)}")
        elif contents(place / "out") != self.expected[sort]:
            problems.append("other bytes in the end")
        if left := leftovers(place):
            problems.append(f"left: {left}")
        shutil.rmtree(place)
        return [f"{sort}, {'; '.join(story)}: {p}" for p in problems]

    def half_finished(self, sort: str, place: Path) -> dict[str, bytes]:
        """Files under a final name that are not as they should be."""
        if not (place / "out").exists():
            return {}
        found = {n: d for n, d in contents(place / "out").items() if ".actmat-" not in n}
        return {n: d for n, d in found.items() if self.expected[sort].get(n) != d}


def _child(argv: list[str], place: Path, fault: Fault | None) -> None:
    """Run `actmat` in this process; never returns."""
    code = 70
    try:
        handle = os.open(place / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 2)
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


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    import torch

    import actmat.api
    import actmat.cli.main
    import actmat.cli.screen  # noqa: F401 - all that a merge imports, so that faults meet the merge

    torch.set_num_threads(1)
    done: Counter[str] = Counter()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder) / "chaos")
        for k in range(args.runs):
            rng = random.Random(f"{args.seed} {k}")
            sort, kind = list(SORTS)[k % len(SORTS)], KINDS[(k // len(SORTS) + k) % len(KINDS)]
            found = chaos.run(sort, kind, rng)
            problems += [f"run {k}: {p}" for p in found]
            done[kind] += 1
    print("\n".join([*problems, f"{args.runs} runs, {len(problems)} problems; {dict(done)}"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
