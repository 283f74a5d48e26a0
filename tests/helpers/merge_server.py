"""Runs `actmat` in children that have everything imported, so that a signal falls into the merge and not into imports.

Reads arguments and a moment as JSON, one line each; answers `started PID`, then `ended STATUS` (negative: signal).
`Server` is the other end of the pipe.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EVERYTHING = ("torch", "actmat.api", "actmat.cli.main", "actmat.cli.screen")
"""Modules that a merge imports."""


class Run:
    """One `actmat` process; `wait` gives its exit status and what it printed."""

    def __init__(self, server: Server, pid: int, said: Path) -> None:
        self.server, self.pid, self._said = server, pid, said
        self.began = time.monotonic()

    def signal(self, number: int) -> None:
        """Send a signal now; one that comes too late falls on nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> tuple[int, str]:
        status = int(self.server.answer("ended"))
        return status, self._said.read_text()


class Server:
    """A process that forks an `actmat` per request, one at a time, in `folder`.

    Args:
        folder: of the processes, and of the file that they print to.
        modules: imported before the first of them.
        environment: of the processes; by default this one's, with the packages of this tree.
    """

    def __init__(
        self, folder: Path, modules: Sequence[str] = EVERYTHING, environment: Mapping[str, str] | None = None
    ) -> None:
        env = environment or os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        code = f"import sys; sys.path.append({str(ROOT)!r}); from tests.helpers.merge_server import serve; serve(*{{}})"
        self._said = folder / "said.txt"
        command = [sys.executable, "-c", code.format([str(self._said), *modules])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(env), cwd=folder
        )
        self.answer("ready")

    def start(self, argv: Sequence[str], *, at: tuple[int, int] = (0, 0)) -> Run:
        """Start `actmat ARGV`, which sends itself a signal: `at` is the tensors recorded until then, and its number."""
        self._process.stdin.write(json.dumps([list(argv), at]) + "\n")
        self._process.stdin.flush()
        return Run(self, int(self.answer("started")), self._said)

    def answer(self, word: str) -> str:
        line = self._process.stdout.readline().split()
        assert line, "the server died"
        assert line[0] == word, line
        return line[-1]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def _signal_at(count: int, number: int) -> None:
    """Let this process send itself a signal when it has recorded so many tensors."""
    from actmat.checkpoints.writing.staging import Staging

    record, moments = Staging.record, iter(range(1, count + 1))

    def recording(staging: Any, entry: Any) -> None:
        record(staging, entry)
        if next(moments, 0) == count:
            os.kill(os.getpid(), number)

    Staging.record = recording


def _child(argv: list[str], at: tuple[int, int], said: str) -> None:
    """What the forked process does; never returns."""
    code = 70
    for number in (signal.SIGHUP, signal.SIGTERM):  # `nohup` and background jobs of scripts ignore some
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.argv = ["actmat", *argv]
        if at[1]:
            _signal_at(*at)
        from actmat.cli.main import main

        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(said: str, *modules: str) -> None:
    """Body of the server's process."""
    for name in modules:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _child(*json.loads(line), said)
        print("started", pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)
