"""Lines that are longer than the terminal, continued with an indentation.

A name in a downloaded file may be long enough that a part of it would begin the next line of the terminal, and be taken
for a line of ours. What continues a line is indented here, on a terminal and in a pipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.text import Text

__all__ = ["Hanging", "wrapped"]

INDENT = 4
_START = re.compile(r"\s*(?:- )?")
"""Beginning of a line that is not broken: its indentation and the mark of a problem."""
_WORD = re.compile(r"\S+\s*|\s+")


class Hanging:
    """Text whose lines, where they do not fit, go on in indented ones; wide characters count twice."""

    def __init__(self, text: str | Text, *, indent: int = INDENT) -> None:
        self._text, self._indent = text, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        text = console.render_str(self._text) if isinstance(self._text, str) else self._text
        for line in text.split("\n", allow_blank=True):
            indent = min(self._indent, options.max_width // 4)
            breaks = _breaks(line.plain, options.max_width, indent)
            for n, piece in enumerate(line.divide(breaks)):
                piece.rstrip()
                yield Text(" " * indent * (n > 0), no_wrap=True, overflow="ignore", end="") + piece + Text("\n")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        text = console.render_str(self._text) if isinstance(self._text, str) else self._text
        return Measurement.get(console, options, text)


def wrapped(text: str, width: int) -> str:
    """Plain text with every line that is longer than `width` cells continued in indented ones.

    >>> print(wrapped("the tensor 'all good' differs", 16))
    the tensor 'all
        good'
        differs
    """
    lines = []
    for line in text.split("\n"):
        ends = [*_breaks(line, width, INDENT), len(line)]
        pieces = [line[a:b].rstrip() for a, b in zip([0, *ends], ends, strict=False)]
        lines += [pieces[0], *(" " * INDENT + piece for piece in pieces[1:])]
    return "\n".join(lines)


def _breaks(line: str, width: int, indent: int) -> list[int]:
    """Positions at which a line is broken: between words, inside those that are longer than a line."""
    found = _START.match(line)
    start = found.end() if found and found.end() <= width // 2 else 0
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
