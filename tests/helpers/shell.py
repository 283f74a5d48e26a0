"""The command line in this process: exit codes and output of `actmat ...`."""

import contextlib
import io
import sys
from unittest import mock

from actmat.cli.main import main


def actmat_command(*arguments: object, code: int = 0) -> str:
    """Run `actmat ARGUMENTS` as the console script does; its output, errors included, unwrapped."""
    out = io.StringIO()
    argv = ["actmat", *map(str, arguments)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main()
            found: object = 0
        except SystemExit as stop:
            found = stop.code or 0
    assert found == code, f"exit code {found}, expected {code}:\n{out.getvalue()}"
    return out.getvalue()
