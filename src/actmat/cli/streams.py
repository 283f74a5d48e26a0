"""Standard streams: a closed, broken or full stream never damages a command's work."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import typer

BROKEN_PIPE = 141
"""Exit code after the reader of stdout closed it; the same as of a process ended by SIGPIPE."""


INDENT = 4
_START = re.compile(r"\s*(?:- )?")
"""Start of a line that stays whole: its indentation and the mark of a problem."""
_WORD = re.compile(r"\S+\s*|\s+")


def open_closed_streams() -> None:
    """Open /dev/null for every closed standard stream; otherwise a weight file would get its descriptor."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)


def show_any_text() -> None:
    """Escape characters that a stream's encoding lacks, such as Greek letters on a Windows console."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def say(message: str, **style: Any) -> None:
    """Print a message on stderr, if writable; on a terminal, wrapped lines are indented."""
    try:
        if sys.stderr is not None and sys.stderr.isatty():
            message = wrapped(message, shutil.get_terminal_size().columns)
        typer.secho(message, err=True, **style)
    except OSError:
        _mute(sys.stderr)


def starting(what: str, arguments: Sequence[str]) -> None:
    """Print on a terminal that torch is being loaded, which takes seconds; not with --quiet or --help."""
    asked = {"--quiet", "--help"} & set(arguments)
    short = any(a[:1] == "-" and a[:2] != "--" and not {"q", "h"}.isdisjoint(a) for a in arguments)
    if not asked and not short and "torch" not in sys.modules and sys.stderr is not None and sys.stderr.isatty():
        say(f"{what}: loading torch ...", dim=True)


@contextlib.contextmanager
def checked_stdout() -> Iterator[None]:
    """End the command if stdout breaks: silently with 141 if its reader closed it, else with a message and 1."""
    try:
        yield
        _flush()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # from rich, which prints the help
            raise typer.Exit(BROKEN_PIPE) from None
        raise
    except OSError as error:
        if not _is_of_stdout(error):
            raise
        _mute(sys.stdout)
        if error.errno == errno.EPIPE:
            raise typer.Exit(BROKEN_PIPE) from None
        say(f"actmat: the result cannot be printed: {error.strerror} (stdout).")
        raise typer.Exit(1) from None


@contextlib.contextmanager
def optional_stdout(done: str) -> Iterator[None]:
    """Print optional output. If stdout breaks, print a note with `done` on stderr and continue."""
    try:
        yield
        _flush()
    except OSError as error:
        if not _is_of_stdout(error):
            raise
        _mute(sys.stdout)
        say(f"actmat: the summary cannot be printed: {error.strerror} (stdout). {done}")


class Notes(io.TextIOBase):
    """The current stderr; write errors are ignored, so that a progress bar cannot stop a merge."""

    @property
    def _stream(self) -> TextIO | None:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def write(self, text: str) -> int:
        """Write the text if possible."""
        self._call("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        self._call("flush")

    def _call(self, name: str, *arguments: str) -> None:
        stream = self._stream
        try:
            if stream is not None:
                getattr(stream, name)(*arguments)
        except OSError:
            _mute(stream)

    def isatty(self) -> bool:
        """True if stderr is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """File descriptor of stderr, used to find the terminal's width."""
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of stderr."""
        return getattr(self._stream, "encoding", None) or "utf-8"


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _is_of_stdout(error: OSError) -> bool:
    """True if the error came from stdout: its unwritten buffer then fails again."""
    try:
        _flush()
    except OSError:
        return True
    unbuffered = getattr(sys.stdout, "write_through", False)
    return unbuffered and error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF)


def _mute(stream: TextIO | None) -> None:
    """Point a stream at /dev/null, so that its buffer does not fail again at exit."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


def wrapped(text: str, width: int) -> str:
    """Wrap every line of a plain text longer than `width` cells, with an indentation.

    >>> print(wrapped("the tensor 'all good' differs", 16))
    the tensor 'all
        good'
        differs
    """
    lines = []
    for line in text.split("\n"):
        ends = [*line_breaks(line, width, INDENT), len(line)]
        pieces = [line[a:b].rstrip() for a, b in zip([0, *ends], ends, strict=False)]
        lines += [pieces[0], *(" " * INDENT + piece for piece in pieces[1:])]
    return "\n".join(lines)


def line_breaks(line: str, width: int, indent: int) -> list[int]:
    """Positions at which a line is wrapped: between words, or inside words longer than a line."""
    from rich.cells import cell_len, chop_cells

    mark = _START.match(line)
    start = mark.end() if mark and mark.end() <= width // 2 else 0
    breaks: list[int] = []
    column = start
    for word in _WORD.finditer(line, start):
        if column > (start if not breaks else indent) and column + cell_len(word[0].rstrip()) > width:
            breaks.append(word.start())
            column = indent
        at, room = word.start(), max(width - column, 2)
        while cell_len(line[at : word.end()].rstrip()) > room:
            at += len(chop_cells(line[at : word.end()], room)[0])
            breaks.append(at)
            column, room = indent, max(width - indent, 2)
        column += cell_len(line[at : word.end()])
    return breaks
