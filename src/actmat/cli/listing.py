"""Registry of commands: groups in `actmat --help`, exit codes, and commands of other distributions.

A command is a function or a `typer.Typer` that `command` marks with its group and exit codes. Its module must import
fast: `actmat --help` imports it to show the first line of its help. Its flags are built only when it is invoked.
"""

from __future__ import annotations

import functools
import importlib
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import typer
import typer.core
import typer.main

from actmat.cli.flags import with_flags
from actmat.cli.streams import starting
from actmat.plugins import entries

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "actmat.commands"

COMMANDS = (
    *("merge", "average", "plan", "extract", "inspect", "verify", "diagnose", "methods", "push"),
    *("demo", "export", "statistics", "try", "tune"),
)
"""Commands of this distribution. Each is the function of its name in the module of its name in `actmat.cli`; Python
keywords get a trailing underscore."""

GROUPS = ("merge", "look", "choose", "share", "research", "more")
"""Panels of `actmat --help`, in order."""

DISTRIBUTIONS = {"analyze": "actmat-experiments", "experiment": "actmat-experiments", "ui": "actmat-app"}
"""Commands documented here but installed by another distribution."""

COMMON: Mapping[int, str] = {
    2: "the command line is wrong",
    3: "failed while running: a numerical failure, too little memory, or a bug",
    130: "interrupted (Ctrl-C); 143: SIGTERM, 129: SIGHUP",
    141: "the reader of stdout closed it, as 'head' does",
}
"""Exit codes that every command can return."""

BAD_INPUTS = "the inputs, the recipe or the output folder are wrong; all problems are listed"

Declared = TypeVar("Declared", bound=Callable[..., Any] | typer.Typer)


@dataclass(frozen=True)
class CommandInfo:
    """Group, exit codes and import cost of a command.

    Args:
        group: panel of `actmat --help`.
        exits: exit code -> meaning, in addition to `COMMON`.
        imports_torch: the command starts by importing torch, which takes seconds, and announces it.
    """

    group: Literal["merge", "look", "choose", "share", "research", "more"] = "more"
    exits: Mapping[int, str] = field(default_factory=dict)
    imports_torch: bool = False


def command(
    group: Any, done: str, refused: str = BAD_INPUTS, *, imports_torch: bool = False
) -> Callable[[Declared], Declared]:
    """Decorator of a command.

    Args:
        group: panel of `actmat --help`.
        done: meaning of exit code 0.
        refused: meaning of exit code 1.
        imports_torch: see `CommandInfo`.
    """

    def mark(declared: Declared) -> Declared:
        vars(declared)["command_info"] = CommandInfo(group, {0: done, 1: refused}, imports_torch)
        return declared

    return mark


def info_of(declared: Any) -> CommandInfo:
    """The `CommandInfo` of a command; defaults for a command without one."""
    return getattr(declared, "command_info", None) or CommandInfo()


@functools.cache
def plugged_in() -> dict[str, EntryPoint]:
    """Command name -> entry point, for commands of plug-ins."""
    return dict(entries(ENTRY_POINTS))


def declared_command(name: str) -> Any:
    """Import the function or application of a command; None if it is unknown or cannot be imported."""
    if name in COMMANDS:
        function = f"{name}_" if keyword.iskeyword(name) else name
        return getattr(importlib.import_module(f"actmat.cli.{function}"), function)
    try:
        return plugged_in()[name].load()
    except (KeyError, ImportError):
        return None


def _list_settings(made: Any) -> None:
    """Add the fields that --set takes to a command's help."""
    if settings := getattr(made.callback, "settings", {}):
        listed = "\n".join(f"[bold]{name}[/bold]: {text}" for name, text in settings.items())
        made.epilog = f"[bold]Fields that --set NAME=VALUE takes, or --NAME VALUE[/bold]:\n\n{listed}\n\n{made.epilog}"


def _with_set(arguments: Sequence[str], settings: Mapping[str, str]) -> list[str]:
    """The arguments with `--NAME VALUE` and `--NAME=VALUE` as `--set NAME=VALUE`, for fields without a flag."""
    spelled: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in settings:
            spelled += ["--set", f"{name}{equals}{value}"]
        elif spelled[-2:-1] == ["--set"] and "=" not in spelled[-1] and not argument.startswith("--"):
            spelled[-1] += f"={argument}"
        else:
            spelled.append(argument)
    return spelled


def _typer_command(name: str, declared: Any, *, flags: bool) -> Any:
    """Build the typer command of a function, with flags if requested, or the group of a `typer.Typer`."""
    info = info_of(declared)
    codes = "; ".join(f"{code} {meaning.replace('`', '')}" for code, meaning in info.exits.items())
    epilog = f"Exit codes: {codes}. Others: see 'actmat -h'." if codes else None
    if isinstance(declared, typer.Typer):
        made: Any = typer.main.get_command(declared)
        for each in (made, *made.commands.values()):
            each.epilog = epilog
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        callback = with_flags(declared) if flags else lambda: None
        single.command(name, help=declared.__doc__, epilog=epilog)(callback)
        made = typer.main.get_command(single)
    made.name, made.rich_help_panel = name, info.group.capitalize()
    return made


class Commands(typer.core.TyperGroup):
    """The group of all commands. Ours take precedence over those of other distributions."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all importable commands, ordered by group."""
        names = [*COMMANDS, *(n for n in plugged_in() if n not in COMMANDS)]
        commands = {n: declared for n in names if (declared := declared_command(n)) is not None}
        return sorted(commands, key=lambda n: GROUPS.index(info_of(commands[n]).group))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command without flags, as `actmat --help` lists it; None if absent."""
        declared = declared_command(cmd_name)
        return None if declared is None else _typer_command(cmd_name, declared, flags=False)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command named by the arguments, with its flags; name a missing distribution."""
        name = args[0]
        declared = declared_command(name)
        if declared is not None:
            if info_of(declared).imports_torch:
                starting(name, args[1:])
            made = _typer_command(name, declared, flags=True)
            called = getattr(made, "commands", {}).get("".join(args[1:2]), made)
            if "--help-all" in args:
                _list_settings(called)
            rest = ["--help" if a == "--help-all" else a for a in args[1:]]
            return name, made, _with_set(rest, getattr(called.callback, "settings", {}))
        if name in DISTRIBUTIONS:
            ctx.fail(
                f"'{name}' belongs to the distribution {DISTRIBUTIONS[name]}, which is not installed or does not "
                f"match this version of actmat. Fix: pip install {DISTRIBUTIONS[name]}, or in a checkout "
                f"of actmat: pip install packages/{DISTRIBUTIONS[name]}"
            )
        names: Any = dict.fromkeys(self.list_commands(ctx))
        self.commands.update(names)  # typer suggests close names of these
        return super().resolve_command(ctx, args)
