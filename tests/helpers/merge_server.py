"""Runs `actmat` in children that have everything imported, so that a signal falls into the merge and not into imports.

Reads one JSON list of arguments per line; answers with a line `started PID`, then `ended STATUS` (negative: signal).
Started with `python -m tests.helpers.merge_server ERRORS [MODULE...]`; `Server` is the other end of the pipe.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Run:
    """One `actmat` process; `wait` gives its exit status and what it printed on stderr."""

    def __init__(self, server: Server, pid: int, errors: Path) -> None:
        self.server, self.pid, self._errors = server, pid, errors
        self.began = time.monotonic()

    def signal(self, number: int) -> None:
        """Send a signal now; one that comes too late falls on nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> tuple[int, str]:
        status = int(self.server.answer("ended"))
        return status, self._errors.read_text()


class Server:
    """A process that forks an `actmat` per request, one at a time; `modules` are imported before as well."""

    def __init__(self, folder: Path, modules: Sequence[str] = ()) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        command = [sys.executable, "-m", "tests.helpers.merge_server", str(folder / "stderr.txt"), *modules]
        self._folder = folder
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=folder
        )
        self.answer("ready")

    def start(self, argv: Sequence[str]) -> Run:
        """Start `actmat ARGV`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(argv)) + "\n")
        self._process.stdin.flush()
        return Run(self, int(self.answer("started")), self._folder / "stderr.txt")

    def answer(self, word: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().split()
        assert line, "the server died"
        assert line[0] == word, line
        return line[-1]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@contextlib.contextmanager
def merge_server(folder: Path, modules: Sequence[str] = ()) -> Iterator[Server]:
    """A server that writes its children's stderr into `folder`, and has imported `modules` for them."""
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(folder, modules)
    try:
        yield server
    finally:
        server.close()


def _child(argv: list[str], errors: str) -> None:
    """What the forked process does; never returns."""
    code = 70
    for number in (signal.SIGHUP, signal.SIGTERM):  # `nohup` and background jobs of scripts ignore some
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        handle = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 2)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        sys.argv = ["actmat", *argv]
        from actmat.cli.main import main

        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(errors: str, modules: Sequence[str]) -> None:
    import torch

    import actmat.api
    import actmat.cli.main
    import actmat.cli.screen  # noqa: F401 - everything a merge imports

    for name in modules:
        importlib.import_module(name)
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _child(json.loads(line), errors)
        print("started", pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
