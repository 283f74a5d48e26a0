"""Run commands of `actmat` one after another, each in a process of its own that has its imports done already.

    python -P benchmarks/comparison/server.py      # with PYTHONPATH=TREE/src

Reads one JSON object per line, `arguments` and `output` (file that gets what the command prints), and answers with its
exit status. Only the imports are shared: a command runs as `python -m actmat` does, in a fork of this process, and the
modules that it imported are then imported here, for those after it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import sys
import traceback

PIPE_BYTES = 1 << 16
"""A pipe takes so much without a reader."""


def run(arguments: list[str], output: str) -> int:
    """Exit status of `python -m actmat ARGUMENTS` in a fork of this process."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, 1)
            os.dup2(file, 2)
            before = set(sys.modules)
            status = _actmat(arguments)
            os.write(sending, "\n".join(name for name in sys.modules if name not in before).encode()[:PIPE_BYTES])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(sending)
    with open(receiving) as pipe:
        names = pipe.read().split("\n")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for name in names:
        with contextlib.suppress(ImportError, ValueError):  # names that are no files, and a last one that is cut off
            importlib.import_module(name)
    return status


def _actmat(arguments: list[str]) -> int:
    sys.argv = ["actmat", *arguments]
    try:
        runpy.run_module("actmat", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - printed, as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    import torch  # noqa: F401 - two thirds of the start-up of a small merge

    for line in sys.stdin:
        asked = json.loads(line)
        print(run(asked["arguments"], asked["output"]), flush=True)


if __name__ == "__main__":
    main()
