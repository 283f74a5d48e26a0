"""Entry point of the command line: process settings, signals, exit codes of errors."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from actmat.cli.listing import Commands
from actmat.cli.streams import checked_stdout, open_closed_streams, say, show_any_text
from actmat.errors import MergeError, OutputError, did_you_mean, memory_errors
from actmat.foreign import terminal
from actmat.version import __version__

MOST_FRAMES = 5
"""Number of calls that a bug message lists."""


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise `Stopped` on SIGTERM and SIGHUP, unless they are ignored (`nohup`) or handled already."""
    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP
    names = known if threading.current_thread() is threading.main_thread() else []
    taken = [n for n in names if signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


class _Application(Commands):
    """All commands. An interruption prints how to continue; a broken stdout ends the command."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with checked_stdout(), _printable_usage_errors():  # --help prints here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        try:
            with checked_stdout(), _printable_usage_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            by_signal = isinstance(stop, Stopped)
            said = _notes(stop) or ("the same command goes on where it stopped.",)
            say("; ".join([f"actmat: stopped by {stop}" if by_signal else "actmat: interrupted", *said]))
            raise typer.Exit(128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)) from None


def _notes(error: BaseException) -> tuple[str, ...]:
    """Notes attached to an error, such as the kept state of an unfinished merge."""
    return tuple(getattr(error, "__notes__", ()))


_UsageError: Any = typer.BadParameter.__base__
"""Base class of all usage errors; its module depends on the version of typer."""


@contextlib.contextmanager
def _printable_usage_errors() -> Iterator[None]:
    """Print usage errors as one line of printable characters; arguments can contain file names."""
    try:
        yield
    except _UsageError as error:
        error.message = terminal(error.message) + _hint(error)
        raise


GONE = {
    "--average": "Averages are made by 'actmat average WEIGHTS CHECKPOINT...'",
    "--cuda": "For GPUs use --device cuda",
    "--strict": "Of a merge made with --diagnose: 'actmat diagnose MERGED --strict'",
}
"""Flags that users of other tools or commands type -> the right way."""


def _hint(error: Any) -> str:
    """Suggest the right spelling of a flag that a command lacks, and a fix for `-e experts/*` (of the shell)."""
    command: Any = getattr(error.ctx, "command", None)
    if type(error).__name__ == "NoSuchOption" and error.option_name.startswith("--"):
        return _similar_flag(error.option_name, command)
    parameters = getattr(command, "params", ())
    if "unexpected extra argument" not in error.message or not any("--expert" in p.opts for p in parameters):
        return ""
    if any("--expert" in p.opts and error.ctx.params.get(p.name) for p in parameters):
        return ". Each expert needs its own flag: -e A -e B; for all in a folder: $(printf ' -e %s' experts/*)"
    return ". Name the output with --out OUT, and each expert with its own flag: -e A -e B"


def _similar_flag(flag: str, command: Any) -> str:
    """The field for --set, or the option of a method, that an unknown flag seems to mean."""
    from actmat.methods import METHODS

    name, settings = flag.removeprefix("--").replace("-", "_"), getattr(command.callback, "settings", {})
    if flag in GONE:
        return f". {GONE[flag]}"
    if owners := [m.name for m in METHODS if name in m.options]:
        return f". It is an option of the method ({', '.join(owners)}): -o {name}=VALUE"
    near = did_you_mean(name, [*settings, *(p.name for p in command.params)])
    return f".{near} Fields are set with --set NAME=VALUE" if any(f"'{s}'" in near for s in settings) else ""


app = typer.Typer(
    name="actmat",
    cls=_Application,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Merge fine-tuned models of one base into one model. Give one prompt of each task, better eight:\n\n"
    "actmat merge -b BASE -e math=MODEL1 -e code=MODEL2 --out MERGED\n"
    "       --data math='A typical question.' --data code=prompts.jsonl\n\n"
    "Without models of your own: actmat demo. In a browser: actmat ui.",
    epilog="Exit codes: 0 done; 1 the inputs, the recipe or the output folder are wrong; 2 the command line is wrong; "
    "3 failed while running; 130 interrupted, 143 SIGTERM, 129 SIGHUP (the same command continues); "
    "141 the reader of stdout closed it.",
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True)) -> None:
    if version:
        typer.echo(f"actmat {__version__}")
        raise typer.Exit


def _keep_pages_warm() -> None:
    """Request huge pages and let malloc keep freed pages; page faults would take a fifth of a merge's time.

    Buffers of a pass have 0.5 to 2 MB, which glibc by default returns to the system after each pass. The settings are
    process-wide, so the library does not change them. Without glibc this does nothing.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch when it is imported
    with contextlib.suppress(OSError, AttributeError, TypeError):  # TypeError: Windows
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 32 << 20)
        mallopt(mmap_threshold, 4 << 20)


def _allow_many_files() -> None:
    """Raise the soft limit of open files to the hard limit; averaging 1000 checkpoints opens 1000 files."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Run the command line. A `MergeError` is printed with its exit code; any other error is printed as a bug."""
    gc.set_threshold(200_000, 10, 10)  # imports create 300,000 objects: a threshold of 700 collects often
    atexit.register(gc.freeze)  # a final collection over all objects would take half a second
    _keep_pages_warm()
    _allow_many_files()
    open_closed_streams()
    show_any_text()
    try:
        with stopped_by_signals(), memory_errors():
            app()
    except MergeError as error:
        _fail(str(error), error, error.exit_code)
    except Exception as error:  # noqa: BLE001 - users never see a traceback
        if full := _full_disk(error):
            _fail(full, error, OutputError.exit_code)
        _fail(_describe_bug(error), error, MergeError.exit_code)


def _full_disk(error: Exception) -> str:
    """Message for a disk that took no more, outside of an output or in a library's own writer; else empty."""
    code = re.search(r"os error (\d+)", str(error))  # of safetensors
    number = getattr(error, "errno", None) or (int(code[1]) if code else None)
    if "failed writing file" in str(error):  # of torch, whose errors have no number
        number = errno.ENOSPC
    if number not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        return ""
    place = getattr(error, "filename", None) or os.environ.get("TMPDIR") or "the output, or the temporary folder"
    return f"Cannot write to {terminal(place)}: {os.strerror(number)}. Fix: free some space; the inputs are unchanged."


def _describe_bug(error: Exception) -> str:
    """Message for an unexpected error: the last calls, and how to report the bug."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "actmat" in f.filename][-MOST_FRAMES:]
    calls = ", ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames)
    description = terminal(f"{type(error).__name__}: {error}")[:200]  # it may quote an input
    return (
        f"this is a bug: {description} ({calls}; actmat {__version__})\n"
        "Please report it with the repository's form 'Something is wrong': include these lines, the command, the "
        "recipe, and 'actmat inspect' of the base and of one expert. The inputs are unchanged; repeating the command "
        "continues the merge."
    )


def _fail(message: str, error: Exception, code: int) -> None:
    """Print a message, in red on a terminal, and exit."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    say("\n".join([f"actmat: {message}", *_notes(error)]), fg="red" if is_terminal else None)
    sys.exit(code)
