"""Commands in forks of one process that has loaded torch: what a new one needs most of its time for."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.helpers.repository import ROOT


def in_fork(work: Callable[[], object], name: str = "") -> subprocess.CompletedProcess[str]:
    """Call `work` in a fork of this process; what it prints, and its exit status."""
    with tempfile.TemporaryFile("w+") as stream:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            status = 1
            try:
                work()
                status = 0
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            finally:
                if sys.exc_info()[0] is not None:  # not an exit: a failure, which the output shows
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        stream.seek(0)
        return subprocess.CompletedProcess(name, status, stream.read())


def actmat_in_fork(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The command line with `argv`, of which the first is the name of the program, in a fork of this process."""

    def work() -> None:
        sys.argv = list(argv)
        from actmat.cli.main import main

        main()

    return in_fork(work, argv[0])


class ForkServer:
    """`actmat` with an environment of its own: one process loads it, and each command runs in a fork of that one."""

    def __init__(self, folder: Path, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        code = f"import sys; sys.path.append({str(ROOT)!r}); from tests.helpers.forks import serve; serve({preload!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=dict(environment), cwd=folder,
        )  # fmt: skip

    def actmat(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Exit status and output of one command."""
        streams = self._process
        assert streams.stdin is not None
        assert streams.stdout is not None
        streams.stdin.write(json.dumps(["actmat", *map(str, arguments)]) + "\n")
        streams.stdin.flush()
        status, said = json.loads(streams.stdout.readline())
        return subprocess.CompletedProcess("actmat", status, said)

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


def serve(preload: Sequence[str]) -> None:
    """Body of the server's process."""
    for name in preload:
        importlib.import_module(name)
    for line in sys.stdin:
        done = actmat_in_fork(json.loads(line))
        print(json.dumps([done.returncode, done.stdout]), flush=True)
