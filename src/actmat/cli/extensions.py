"""Commands of other distributions: entry points of the group `actmat.commands`, found when they are needed.

An entry point names a `typer.Typer` application. Its module is imported for `actmat --help`, which shows the first line
of its help, and when the command is invoked, so it must be as light as the modules of this package.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import typer
import typer.core
import typer.main

from actmat.cli.signature import deferred
from actmat.plugins import entries

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "ExtensibleGroup", "as_command"]

GROUP = "actmat.commands"

_DISTRIBUTIONS = {"analyze": "actmat-experiments", "experiment": "actmat-experiments"}
"""Commands that are documented here but installed by another distribution."""


@functools.cache
def _extensions() -> dict[str, EntryPoint]:
    """Name of the command -> entry point, in the order of the names."""
    return dict(entries(GROUP))


def as_command(name: str, found: Any, *, defer: bool) -> Any:
    """The typer command of a function, or the group of a `typer.Typer`.

    Args:
        name: of the command.
        found: the function or application.
        defer: whether its flags are built only when it is called, see `signature.deferred`.
    """
    if isinstance(found, typer.Typer):
        group = typer.main.get_command(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name)(deferred(found) if defer else found)
    return typer.main.get_command(alone)


class ExtensibleGroup(typer.core.TyperGroup):
    """A group of commands to which installed distributions add theirs. A command of its own takes precedence."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Own commands in order of registration, then those of other distributions that can be imported."""
        own = super().list_commands(ctx)
        return [*own, *(n for n in _extensions() if n not in own and self.get_command(ctx, n) is not None)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, None where there is none or its module cannot be imported."""
        if cmd_name not in self.commands and cmd_name in _extensions():
            try:
                found = _extensions()[cmd_name].load()
                self.commands[cmd_name] = as_command(cmd_name, found, defer=not isinstance(found, typer.Typer))
            except ImportError:
                return None
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the arguments; say what to install where a known one is missing."""
        name = args[0]
        if name in _DISTRIBUTIONS and self.get_command(ctx, name) is None:
            ctx.fail(
                f"'{name}' belongs to the distribution {_DISTRIBUTIONS[name]}, which is not installed here or does "
                f"not match this version of actmat. Install it with: pip install {_DISTRIBUTIONS[name]}, or in a "
                f"checkout of actmat: pip install packages/{_DISTRIBUTIONS[name]}"
            )
        return super().resolve_command(ctx, args)
