"""`actmat`: the command line. Every command has a file of its own and imports the library when it runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import typer

from actmat.cli.average import average
from actmat.cli.calibrate import calibrate
from actmat.cli.compare import compare
from actmat.cli.demo import demo
from actmat.cli.diagnose import diagnose
from actmat.cli.export import export
from actmat.cli.extensions import ExtensibleGroup
from actmat.cli.finish import finish
from actmat.cli.import_ import import_
from actmat.cli.inspect import inspect
from actmat.cli.merge import merge
from actmat.cli.methods import methods
from actmat.cli.plan import plan
from actmat.cli.push import push
from actmat.cli.report import report
from actmat.cli.serve_command import serve_command
from actmat.cli.signals import Stopped, stopped_by_signals
from actmat.cli.signature import deferred, resolved
from actmat.cli.statistics import statistics
from actmat.cli.streams import checked_stdout, open_closed_streams, say
from actmat.cli.try_ import try_
from actmat.cli.tune import tune
from actmat.cli.ui import ui
from actmat.cli.verify import verify
from actmat.errors import MergeError, memory_errors
from actmat.foreign import terminal
from actmat.version import __version__

__all__ = ["app", "main"]


class _Commands(ExtensibleGroup):
    """The commands. Deferred ones get their flags when they are called; an interruption says how to go on."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, resolved(command), rest

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
    """Notes that were added to an error on its way, such as what is kept of an unfinished merge."""
    return tuple(getattr(error, "__notes__", ()))


_UsageError: Any = typer.BadParameter.__base__
"""Base of all errors of the command line; its module is another in each version of typer."""


@contextlib.contextmanager
def _printable_usage_errors() -> Iterator[None]:
    """Show errors of the command line in one line of printable characters: arguments can hold names of files."""
    try:
        yield
    except _UsageError as error:
        error.message = terminal(error.message)
        raise


app = typer.Typer(
    name="actmat",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Merge fine-tuned models of one base into one model, without data.",
    epilog="Exit codes: 0 done; 1 the inputs, the recipe or the output place are wrong; 2 the command line is wrong; "
    "3 failed while running; 130 interrupted, 143 SIGTERM, 129 SIGHUP (the same command goes on where it stopped); "
    "141 the reader of stdout went away.",
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and stop.", is_eager=True)) -> None:
    if version:
        typer.echo(f"actmat {__version__}")
        raise typer.Exit


for recipe_command in (merge, average, plan, diagnose, try_, tune):  # the recipe's schema takes long to import
    app.command()(deferred(recipe_command))
own = (finish, push, serve_command, report, compare, methods, inspect, import_, export, verify, calibrate, ui, demo)
for command in own:
    app.command()(command)
app.add_typer(statistics, name="statistics")


def _keep_pages_warm() -> None:
    """Ask for huge pages and let malloc keep freed pages: page faults would take a fifth of a merge's time.

    Buffers of a pass are 0.5 to 2 MB, which glibc by default returns to the system after each pass. These are settings
    of a process, so the library does not make them. Without glibc this does nothing.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch when it is imported
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 32 << 20)
        mallopt(mmap_threshold, 4 << 20)


def _allow_many_files() -> None:
    """Raise the soft limit of open files to the hard one: a trajectory of 1000 checkpoints has as many files."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Run the command line; a `MergeError` becomes one message and its exit code, any other error a report."""
    gc.set_threshold(200_000, 10, 10)  # imports create 300,000 objects: the usual 700 would mean hundreds of searches
    _keep_pages_warm()
    _allow_many_files()
    open_closed_streams()
    try:
        with stopped_by_signals(), memory_errors():
            app()
    except MergeError as error:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        say("\n".join([f"actmat: {error}", *_notes(error)]), fg="red" if is_terminal else None)
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - no error ends in a traceback
        from actmat.cli.bug import describe_bug

        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        say("\n".join([f"actmat: {describe_bug(error, sys.argv)}", *_notes(error)]), fg="red" if is_terminal else None)
        sys.exit(MergeError.exit_code)
