"""Flags of a command from the types of its parameters: the fields of a recipe, or of a dataclass of settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main

from actmat.cli.recipes import RecipeFlags
from actmat.flag import Flag

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["Fields", "deferred", "resolved", "with_flags"]

Command = Callable[..., None]


@dataclass(frozen=True)
class Fields:
    """Annotation of a group of flags: the command takes `only` these fields, or all `without` these."""

    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Group:
    """Flags that together make one argument of a command."""

    parameters: list[inspect.Parameter]
    make: Callable[[dict[str, Any]], Any]


def with_flags(command: Command) -> Command:
    """`command` with a flag for each field, in place of parameters that are `RecipeFlags` or a dataclass.

    A field of the recipe is a flag if it is annotated with a `Flag`; a field of a dataclass if it is annotated with a
    `Flag` or with a `typer.Option`. `Annotated[..., Fields(...)]` selects some of them. Typer reads the new signature.
    """
    declared = inspect.signature(command, eval_str=True).parameters.values()
    groups = {p.name: group for p in declared if (group := _group(p.annotation)) is not None}
    if not groups:
        return command
    parameters: list[inspect.Parameter] = []
    for parameter in declared:
        group = groups.get(parameter.name)
        parameters += group.parameters if group else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group.make({p.name: given.pop(p.name) for p in group.parameters})
        command(**given)

    vars(flat)["__signature__"] = inspect.Signature(parameters)
    return flat


def deferred(command: Command) -> Command:
    """A stand-in without parameters for `command`, whose flags take time to build: enough for lists of commands."""

    def listed() -> None:
        raise AssertionError(f"'{command.__name__}' is resolved before it runs")

    listed.__name__, listed.__doc__ = command.__name__, command.__doc__
    vars(listed)["stands_for"] = command
    return listed


def resolved(listed: Any) -> Any:
    """The typer command with all its flags, given one that may be made of a `deferred` function."""
    command = getattr(getattr(listed, "callback", None), "stands_for", None)
    if command is None:
        return listed
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(listed.name)(with_flags(command))
    return typer.main.get_command(app)


def _group(annotation: Any) -> _Group | None:
    kind: Any
    kind, *marks = typing.get_args(annotation) if typing.get_origin(annotation) is Annotated else (annotation,)
    if kind is RecipeFlags:
        from actmat.recipe import Recipe

        group = _Group(list(_of_model(Recipe)), RecipeFlags)
    elif dataclasses.is_dataclass(kind):
        make: Any = kind
        group = _Group(list(_of_dataclass(kind)), lambda given: make(**given))
    else:
        return None
    for fields in (m for m in marks if isinstance(m, Fields)):
        unknown = {*fields.only, *fields.without} - {p.name for p in group.parameters}
        assert not unknown, f"{kind.__name__} has no flags for {unknown}"
        kept = [p for p in group.parameters if p.name not in fields.without]
        group = _Group([p for p in kept if not fields.only or p.name in fields.only], group.make)
    return group


def _of_model(model: type[BaseModel]) -> Iterator[inspect.Parameter]:
    """Flags of a recipe's fields. None stands for a flag that is not given: then a recipe file decides."""
    from actmat.recipe import ExpertRef
    from actmat.recipe.output import KINDS

    for name, field in model.model_fields.items():
        for flag in (m for m in field.metadata if isinstance(m, Flag)):
            text = flag.help.removesuffix(".") or _sentence(field.description or "")
            if shown := _spelled(flag, field.default):
                text += f"; default: {shown}"
            yield _parameter("to" if name == "output" else name, field.annotation, flag, text, None)
        if name == "experts":
            yield from _of_model(ExpertRef)
        if name == "output":
            yield from {p.name: p for kind in KINDS.values() for p in _of_model(kind)}.values()


def _of_dataclass(kind: Any) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if typing.get_origin(hints[field.name]) is not Annotated:
            continue
        annotation, flag, *_ = typing.get_args(hints[field.name])
        if isinstance(flag, Flag):
            yield _parameter(field.name, annotation, flag, flag.help, field.default)
        else:
            yield _keyword(field.name, hints[field.name], field.default)


def _parameter(name: str, annotation: Any, flag: Flag, text: str, default: Any) -> inspect.Parameter:
    kind = flag.type or _typed(annotation)
    kind = types.GenericAlias(list, (kind,)) if flag.repeated else kind
    text, _, shown = text.removesuffix(".").partition("; default: ")
    option = typer.Option(
        *(flag.names or (f"--{name.replace('_', '-')}",)), help=f"{text} (default: {shown})." if shown else f"{text}."
    )
    return _keyword(name, Annotated[kind | None if default is None else kind, option], default)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _sentence(description: str) -> str:
    return f"{description[:1].upper()}{description[1:]}".replace("`", "'")


def _spelled(flag: Flag, default: Any) -> str:
    """A default as it is written on the command line: that of a switch is its name."""
    if isinstance(default, bool):
        on, _, off = flag.names[0].partition("/") if flag.names else ("", "", "")
        return on if default else off
    return str(default) if isinstance(default, str | int | float) else ""


def _typed(annotation: Any) -> Any:
    """Type of a flag's value. Texts are passed on for choices and structures: the recipe's schema judges them."""
    origin = typing.get_origin(annotation)
    kinds = [_typed(a) for a in typing.get_args(annotation) if a is not types.NoneType]
    if origin is Annotated:
        return kinds[0]
    if origin is tuple:
        return types.GenericAlias(list, (kinds[0],))
    if origin is dict:
        return list[str]
    if origin in (typing.Union, types.UnionType):
        return str if str in kinds else kinds[0]
    return annotation if annotation in (bool, int, float, Path) else str
