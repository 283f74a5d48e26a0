"""Settings of a suite: a frozen dataclass, changed by `--set name=value`."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from actmat.errors import RecipeError, did_you_mean

Settings = TypeVar("Settings")


def changed(settings: Settings, values: Mapping[str, str]) -> Settings:
    """The settings with some fields set from text; parsed by the type of the field.

    A comma separates the values of a field that is a tuple; "none" is None; `a.b` is field `b` of the dataclass `a`.

    Raises:
        RecipeError: a field does not exist or cannot take its value; names all such, with the near name.
    """
    known = names_of(settings)
    problems = []
    for name, text in values.items():
        if name not in known:
            problems.append(
                f"unknown setting '{name}'.{did_you_mean(name, known)} Settings: {', '.join(sorted(known))}"
            )
            continue
        try:
            settings = _with(settings, name.split("."), text)
        except ValidationError as error:
            problems.append(f"setting '{name}' cannot be {text!r}: {error.errors()[0]['msg']}")
    if problems:
        raise RecipeError("Invalid settings of the suite.", problems)
    return settings


def names_of(settings: Any) -> list[str]:
    """Names of all fields that `changed` can set; those of a field that is a dataclass behind its name and a dot."""
    found = []
    for f in fields(settings):
        value = getattr(settings, f.name)
        found += [f"{f.name}.{inner}" for inner in names_of(value)] if is_dataclass(value) else [f.name]
    return found


def _with(settings: Any, path: Sequence[str], text: str) -> Any:
    name, *rest = path
    if rest:
        return replace(settings, **{name: _with(getattr(settings, name), rest, text)})
    kind = typing.get_type_hints(type(settings))[name]
    value: Any = None if text.lower() == "none" else text
    if typing.get_origin(kind) is tuple and value is not None:
        value = [v for v in text.split(",") if v]
    return replace(settings, **{name: TypeAdapter(kind).validate_python(value)})
