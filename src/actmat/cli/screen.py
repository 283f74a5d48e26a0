"""Output of commands: consoles for stdout and stderr, tables, progress bars, JSON.

Lines longer than the terminal continue with an indentation, also in a pipe. Otherwise part of a long name from a
downloaded file could begin a line and look like a message of actmat.

JSON is one object per command on stdout. It begins with `schema`, the name and version of its layout, such as
`actmat.verify/1`. The version grows when a field is renamed, removed or changes its meaning; new fields may appear at
any time. Lists with a row per tensor are left out unless `--full` is given; `left_out` names them with their lengths.
`docs/commands/README.md` has the table.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape as escape_markup
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from actmat.cli.streams import INDENT, Notes, line_breaks, say
from actmat.foreign import terminal
from actmat.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn


_COMMANDS = "average extract demo inspect verify diagnose methods tune try push export statistics analyze experiment ui"
LAYOUTS: Mapping[str, int] = dict.fromkeys(("merge", "plan", "recipe", "serve", *_COMMANDS.split()), 1)
"""JSON layout -> version."""

CELL_INDENT = 2
"""Indentation of lines that continue a first column."""

BETWEEN_LINES = 10.0
"""Seconds between lines about a stage when no bar is shown."""


class Hanging:
    """Text whose long lines continue with an indentation; wide characters count twice."""

    def __init__(self, text: str | Text, *, indent: int = INDENT) -> None:
        self._text, self._indent = text, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        text = console.render_str(self._text) if isinstance(self._text, str) else self._text
        for line in text.split("\n", allow_blank=True):
            indent = min(self._indent, options.max_width // 4)
            breaks = line_breaks(line.plain, options.max_width, indent)
            for n, piece in enumerate(line.divide(breaks)):
                piece.rstrip()
                yield Text(" " * indent * (n > 0), no_wrap=True, overflow="ignore", end="") + piece + Text("\n")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        text = console.render_str(self._text) if isinstance(self._text, str) else self._text
        return Measurement.get(console, options, text)


class SafeConsole(Console):
    """Console that escapes unprintable characters.

    It cannot distinguish newlines of foreign text from ours: `escape` and `terminal` replace those on insertion.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield escaped segments; colors and cursor movements are control segments of rich."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else terminal(text, keep="\n"), style, control)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; long lines continue with an indentation, unless `soft_wrap` keeps them whole."""
        wraps = not options.get("soft_wrap")
        super().print(*(Hanging(o) if wraps and isinstance(o, str) else o for o in objects), **options)

    def on_broken_pipe(self) -> None:
        """Re-raise the current error; the command line handles broken pipes."""
        raise  # rich calls this in an except clause


console = SafeConsole(highlight=False, emoji=False)
note_console = SafeConsole(file=cast(IO[str], Notes()), highlight=False, emoji=False)


def escape(text: object) -> str:
    """Escape foreign text for a line with rich markup: printable, one line, its own markup disabled."""
    return escape_markup(terminal(text))


def print_result(layout: str, data: Mapping[str, Any], *, long: Collection[str] = (), full: bool = False) -> None:
    """Print the result of a command as JSON.

    Args:
        layout: name in `LAYOUTS`.
        data: plain data.
        long: fields with a row per tensor, left out unless `full` is set.
    """
    left = {} if full else {name: len(data[name]) for name in long if name in data}
    fields = {name: value for name, value in data.items() if name not in left}
    print_json({"schema": f"actmat.{layout}/{LAYOUTS[layout]}", **fields, **({"left_out": left} if left else {})})


def print_json(data: Any) -> None:
    """Print data as ASCII JSON on stdout; also escapes DEL, which JSON does not."""
    typer.echo(json.dumps(data, indent=1).replace("\x7f", "\\u007f"))


class _PlainTable(Table):
    """Table whose wrapped first column is indented, so that only a cell's start begins a line."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row."""
        first = Hanging(cells[0], indent=CELL_INDENT) if cells and isinstance(cells[0], str) else None
        super().add_row(*([first, *cells[1:]] if first and not self.columns[0].no_wrap else cells), **options)


def plain_table(*columns: str, numbers: Collection[str] = ()) -> Table:
    """Create a table without rules; columns named in `numbers` are right-aligned and never wrapped."""
    table = _PlainTable(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        is_number = name in numbers
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table


def first_to_last(names: Sequence[str]) -> str:
    """`first ... last`, or the only name."""
    return names[0] + (f" ... {names[-1]}" if len(names) > 1 else "")


def progress_bar(*columns: str | ProgressColumn, quiet: bool = False) -> RichProgress:
    """Create a transient bar on stderr; disabled if `quiet` is set or stderr is not a terminal."""
    from rich.progress import Progress as RichProgress

    return RichProgress(*columns, console=note_console, transient=True, disable=quiet or not note_console.is_terminal)


@contextlib.contextmanager
def counting(doing: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a bar for work that counts tensors; yields its callback `(done, total)`."""
    with progress_bar(quiet=quiet) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def hub_bars(*, quiet: bool) -> Iterator[None]:
    """Enable the hub library's progress bars, unless `quiet` is set or stderr is not a terminal."""
    utils: Any = importlib.import_module("huggingface_hub.utils")
    shown = not utils.are_progress_bars_disabled()
    if quiet or not note_console.is_terminal:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            utils.enable_progress_bars()


@contextlib.contextmanager
def showing_progress(*, quiet: bool, lines: bool = False) -> Iterator[Progress]:
    """Show notes, the stage, its remaining time and the best candidate so far on a bar; if `lines`, else as lines."""
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(16), MofNCompleteColumn(), TimeRemainingColumn(), TimeElapsedColumn())
    with progress_bar("{task.description}", *columns, quiet=quiet) as bar:
        yield _Shown(bar, quiet=quiet, lines=lines and bar.disable and not quiet)


class _Shown(Progress):
    """A stage of a call on a bar, or as lines at intervals."""

    def __init__(self, bar: RichProgress, *, quiet: bool, lines: bool) -> None:
        self._bar, self._task, self._quiet, self._lines = bar, bar.add_task("starting", total=None), quiet, lines
        self._what, self._best, self._total, self._printed, self._latest = "", "", 0, 0.0, ""
        self._begun = time.monotonic()
        self._starts = {"": self._begun}

    def doing(self, what: str, total: int = 0) -> None:
        self._what, self._total, self._best = what, total, ""
        self._starts.setdefault(what, time.monotonic())
        self._bar.reset(self._task, total=total or None, description=escape(what)[:60])
        if (text := what + (f": {total}" if total else "")) != self._latest:
            self._print(text)

    def done(self, parts: int) -> None:
        left = (time.monotonic() - self._starts[self._what]) / max(parts, 1) * (self._total - parts)
        ahead = f"about {left:.0f} s left" if parts < self._total else "finishing"
        self._bar.update(self._task, completed=parts)
        if time.monotonic() > self._printed + BETWEEN_LINES:
            self._print(f"{self._what}: {parts} of {self._total}, {ahead}{self._best}")

    def note(self, text: str) -> None:
        if not self._quiet:
            say(f"note: {text}")

    def trial(self, latest: Any, best: Any) -> None:
        self._best = f"; best so far: {best.candidate} ({best.mean:.4g})"
        self._bar.update(self._task, description=escape(self._what + self._best)[:60])

    def _print(self, text: str) -> None:
        self._printed, self._latest = time.monotonic(), text
        if self._lines:
            say(f"{self._printed - self._begun:.0f} s: {text}")
