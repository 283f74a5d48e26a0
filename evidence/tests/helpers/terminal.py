"""The command line in this process, and text as a terminal shows it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from rich.console import Console

from actmat.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str


def actmat(argv: Sequence[object]) -> Outcome:
    """Run `actmat` with these arguments."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch("sys.argv", ["actmat", *map(str, argv)]),
        mock.patch.dict("os.environ", {"COLUMNS": "80", "TERM": "dumb"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Outcome(code, out.getvalue(), err.getvalue())


def console_text(shown: Any, width: int = 80) -> str:
    """The text of a table, or of a function that prints on a console."""
    console = Console(width=width)
    with console.capture() as capture:
        shown(console) if callable(shown) else console.print(shown)
    return capture.get()
