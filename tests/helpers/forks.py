"""Commands in forks of this process, which has loaded torch: what a new one needs most of its time for."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence


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
