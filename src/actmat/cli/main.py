"""`actmat`: the command line. Every command has a file of its own, imported when it is called or listed."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import typer
import typer.main

from actmat.cli.exits import EXITS
from actmat.cli.extensions import ExtensibleGroup, as_command
from actmat.cli.signals import Stopped, stopped_by_signals
from actmat.cli.signature import resolved
from actmat.cli.streams import checked_stdout, open_closed_streams, say, starting
from actmat.errors import MergeError, memory_errors
from actmat.foreign import terminal
from actmat.version import __version__

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = {
    "merge": "merge",
    "average": "average",
    "plan": "plan",
    "diagnose": "diagnose",
    "finish": "finish",
    "extract": "extract",
    "push": "push",
    "serve-command": "serve_command",
    "methods": "methods",
    "inspect": "inspect",
    "verify": "verify",
}
"""Name of a command -> its module in `actmat.cli`, which has a function or a `typer.Typer` of the module's name; in the
order of `actmat --help`."""

FROM_RECIPES = frozenset({"merge", "average", "plan", "diagnose", "try", "tune", "extract"})
"""Commands whose flags come from the recipe's schema, which takes long to import: enough for their own help."""

LONG = frozenset({"merge", "average", "try", "tune", "export", "extract"})
"""Commands that begin with importing torch, and say so."""


class _Commands(ExtensibleGroup):
    """The commands. Deferred ones get their flags when they are called; an interruption says how to go on."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All commands: imports them."""
        return [*COMMANDS, *(name for name in super().list_commands(ctx) if name not in COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported when it is asked for first."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            module = COMMANDS[cmd_name]
            found = getattr(importlib.import_module(f"actmat.cli.{module}"), module)
            self.commands[cmd_name] = as_command(cmd_name, found, defer=cmd_name in FROM_RECIPES)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in LONG:
            starting(name, rest)
        return name, _with_exit_codes(name, resolved(command)), rest

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


def _with_exit_codes(name: str, command: Any) -> Any:
    """The command, or a group and all its commands, with its exit codes below its help."""
    if name in EXITS:
        codes = "; ".join(f"{code} {meaning.replace('`', '')}" for code, meaning in EXITS[name].items())
        for each in (command, *getattr(command, "commands", {}).values()):
            each.epilog = f"Exit codes: {codes}. Others: see 'actmat --help'."
    return command


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
        error.message = terminal(error.message) + _hint(error)
        raise


def _hint(error: Any) -> str:
    """The meaning of `-e experts/*`: a flag takes one value, and the shell wrote several after it."""
    parameters = getattr(getattr(error.ctx, "command", None), "params", ())
    experts = [p.name for p in parameters if "--expert" in p.opts and error.ctx.params.get(p.name)]
    if "unexpected extra argument" not in error.message or not experts:
        return ""
    return ". Each expert needs a flag of its own: -e A -e B; all of a folder: $(printf ' -e %s' experts/*)"


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


def _keep_pages_warm() -> None:
    """Ask for huge pages and let malloc keep freed pages: page faults would take a fifth of a merge's time.

    Buffers of a pass are 0.5 to 2 MB, which glibc by default returns to the system after each pass. These are settings
    of a process, so the library does not make them. Without glibc this does nothing.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch when it is imported
    with contextlib.suppress(OSError, AttributeError, TypeError):  # TypeError: Windows
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
    atexit.register(gc.freeze)  # a search through all objects at the end would take half a second
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
