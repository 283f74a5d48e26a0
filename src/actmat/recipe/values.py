"""Numbers of a recipe that may differ from tensor to tensor: by pattern, by layer, interpolated over depth.

A value is one of

    0.5                                              the same for all tensors
    [0, 0.5, 1]                                      a gradient: interpolated from the first layer to the last
    [{match: "*.mlp.*", value: [0, 1]}, {value: 0.5}]   entries: the first that matches a tensor decides

Of an option that takes one number per expert, a plain list is these numbers, and `[{value: [0, 1]}]` a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from actmat.errors import RecipeError
from actmat.layout.patterns import compile_pattern

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127  # without torch, which takes a second to import


def listed(value: Any) -> Any:
    """A single text as a list of one."""
    return (value,) if isinstance(value, str) else value


def _compilable(pattern: str) -> str:
    try:
        compile_pattern(pattern)
    except RecipeError as error:
        raise ValueError(error.sentence) from None
    return pattern


Patterns = Annotated[tuple[Annotated[str, AfterValidator(_compilable)], ...], BeforeValidator(listed)]


def _held_by_float32(value: float) -> float:
    if abs(value) > FLOAT32_MAX:
        raise ValueError(
            f"found {value:g}, expected a factor that float32 holds, of at most {FLOAT32_MAX:g} in magnitude"
        )
    return value


class Strict(BaseModel):
    """A frozen part of a recipe: an unknown field is an error, and a text stands for the field `TEXT`, if any."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
    TEXT: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {cls.TEXT: value} if cls.TEXT and isinstance(value, str) else value


class Entry(Strict):
    """A value for the tensors that match; the first entry that matches a tensor decides."""

    match: Patterns = Field(default=("*",), description="patterns on tensor names, as in `rules`; default: all")
    layers: tuple[int, int] | Literal["before", "after"] | None = Field(
        default=None,
        description="only these layers, [start, stop], or tensors outside the layers: embeddings ('before') or "
        "the rest ('after'); default: all tensors",
    )
    value: Any = Field(description="a number, or a gradient: a list over the depth, or over `layers`")

    @model_validator(mode="before")
    @classmethod
    def _list_is_gradient(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("value"), list | tuple):
            if not data["value"]:
                raise ValueError("a gradient needs at least one value")
            return {**data, "value": tuple(data["value"])}
        return data


Value: TypeAlias = Any
"""A scalar, a tuple of scalars (a gradient), or a tuple of `Entry`."""


def is_entries(value: Value) -> bool:
    """True for a list of entries."""
    return isinstance(value, tuple) and bool(value) and all(isinstance(v, Entry) for v in value)


def leaves(value: Value) -> Iterator[Any]:
    """Every scalar in a value."""
    if isinstance(value, tuple | list):
        for inner in value:
            yield from leaves(inner.value if isinstance(inner, Entry) else inner)
    else:
        yield value


def read_value(value: Any) -> Value:
    """A weight, a scale or an expert's option from plain data: a list is a gradient.

    Raises:
        ValueError: neither a number, nor a list of numbers, nor entries.
    """
    read = _entries(value) if _may_be_entries(value) else tuple(value) if isinstance(value, list | tuple) else value
    if isinstance(read, tuple) and not read:
        raise ValueError("expected a number, or a list that is a gradient over depth; found an empty list")
    scalars = list(leaves(read))
    if wrong := [leaf for leaf in scalars if isinstance(leaf, bool) or not isinstance(leaf, int | float)]:
        raise ValueError(
            f"expected a number, a list of numbers (a gradient over depth) or of mappings with 'value'; found "
            f"{str(wrong[0])[:100]!r}"
        )
    for leaf in scalars:
        _held_by_float32(float(leaf))
        if leaf != leaf:
            raise ValueError(f"found {leaf}, expected finite numbers")
    return float(read) if isinstance(read, int) else read


def read_option(value: Any) -> Value:
    """A method's option from plain data: a list of plain values stays a list, as some options take one per expert."""
    if _may_be_entries(value):
        return _entries(value)
    return list(value) if isinstance(value, tuple) else value


def _may_be_entries(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(v, Entry) or (isinstance(v, Mapping) and "value" in v) for v in value)
    )


def _entries(value: Any) -> tuple[Entry, ...]:
    try:
        return tuple(Entry.model_validate(v) for v in value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"an entry of the list: {where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from None


Weight = Annotated[float | tuple[float, ...] | tuple[Entry, ...], BeforeValidator(read_value)]
"""A factor that may differ from tensor to tensor."""

WeightOrNone = Annotated[
    float | tuple[float, ...] | tuple[Entry, ...] | None,
    BeforeValidator(lambda value: None if value is None else read_value(value)),
]


def format_value(value: Value) -> str:
    """A value in a few words, for tables.

    >>> format_value(0.5), format_value((0.0, 1.0))
    ('0.5', '0 to 1 over depth')
    """
    if isinstance(value, tuple) and isinstance(value[0], Entry):
        return "by pattern"
    if isinstance(value, tuple):
        return " to ".join(f"{v:g}" for v in value) + " over depth"
    return f"{value:g}" if isinstance(value, float) else str(value)
