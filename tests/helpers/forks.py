"""Commands in forks of this process, which has loaded torch: what a new one needs most of its time for."""

import os
import runpy
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
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for place in (1, 2):
                os.dup2(stream.fileno(), place)
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "w" if n else "r", closefd=False) for n in range(3))
            status = 1
            try:
                work()
                status = 0
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
                if isinstance(stop.code, str):
                    print(stop.code, file=sys.stderr)
            finally:
                if sys.exc_info()[0] is not None:  # not an exit: a failure, which the output shows
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        stream.seek(0)
        return subprocess.CompletedProcess(name, status, stream.read())


def command_in_fork(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """`actmat ...` or `python FILE ...` in a fork of this process; `2> FILE` may follow."""

    def work() -> None:
        sys.argv = list(argv)
        if argv[-2] == "2>":
            os.dup2(os.open(argv[-1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            del sys.argv[-2:]
        if sys.argv[0] == "python":
            del sys.argv[0]
            runpy.run_path(sys.argv[0], run_name="__main__")
            return
        from actmat.cli.main import main

        main()

    return in_fork(work, argv[0])
