"""Flags of commands, and fields that `--set` takes, from the fields of the recipe and of dataclasses of settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.models import OptionInfo

from actmat.checkpoints.layer_names import stack_parts
from actmat.errors import RecipeError, did_you_mean
from actmat.flag import Flag, Setting

if TYPE_CHECKING:
    from pydantic import BaseModel

    from actmat.recipe import Recipe

PANELS: Mapping[str, tuple[str, ...]] = {
    "Options": (
        *("base", "experts", "weight", "method", "options", "scale", "data", "check", "out", "plan"),
        *("overwrite", "diagnose", "json", "full", "quiet"),
    ),
    "Search": ("methods", "scales", "score", "minutes", "budget"),
    "Question": ("prompt", "new_tokens", "images", "lm_eval", "limit", "compare"),
}  # fmt: skip
"""Help panels of a command that takes a recipe, in order -> names of their parameters; the last has the others."""

RecipeArgument = Annotated[
    Path | None, typer.Argument(metavar="RECIPE.yaml", help="A recipe file; flags replace its fields.")
]
BLOCKS = "Factors of an image model's blocks, such as IN=0.5,OUT=0.8."
RECIPE_SUFFIXES = (".yaml", ".yml", ".json")
"""Endings of recipe files."""
_STRUCTURES = ("rules", "roles")
_NOT_SET = (*_STRUCTURES, "path", "name", "measured_from", "notes", "warnings", "executor", "kind", "layout")
"""Fields of a recipe that no command takes: structures, and those that other fields decide."""
Plan = Annotated[bool, typer.Option("--plan", help="Show the plan; write nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Full = Annotated[bool, typer.Option("--full", help="With --json: include the long lists.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors and output for scripts.")]
"""Print no text for people. Scripts still get JSON (with --json) and the output that a command exists for:
the recipe of `plan --as-recipe`, the command of `inspect --serve`, the answers of `try`, the address of `ui`."""
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other field, once per field; --help-all lists them."),
]


@dataclass(frozen=True)
class OutputFlags:
    """Flags for the form of the output."""

    json: Json = False
    full: Full = False
    quiet: Quiet = False


# Recipes


@dataclass(frozen=True)
class RecipeFlags:
    """Values by field of `Recipe`, its output and `ExpertRef`; None for a flag that is not given."""

    values: Mapping[str, Any]

    def __contains__(self, field: str) -> bool:
        return self.values.get(field) not in (None, [])

    @property
    def chosen(self) -> dict[str, Any]:
        """The values of the given flags and of --set."""
        return {name: value for name, value in self.values.items() if name in self}

    def recipes(self, file: Path | None) -> list[Recipe]:
        """The recipe, or one for each combination of methods and listed option values, each with its own `out`.

        Args:
            file: a recipe file; flags replace its fields.

        Raises:
            RecipeError: the flags or the file are not a valid recipe.
        """
        from actmat.api.reading import read_recipe
        from actmat.recipe import make_recipe, parse_option, variants
        from actmat.recipe.output import with_output

        fields = self.chosen
        statistics, stacks = (fields.pop(name, None) for name in ("statistics", "stacks"))
        weights, strengths = _read_weights(fields.pop("weight", ()))
        blocks = fields.pop("blocks", ())
        methods, options = fields.pop("method", []), fields.pop("options", [])
        if "experts" in fields:
            fields["experts"] = experts_of(fields["experts"], weights)
        elif weights:
            raise RecipeError("--weight needs one --expert each; in a recipe file, set each expert's 'weight'.")
        if "out" in fields:
            fields["out"] = str(fields["out"])
        if len(methods) == 1:
            fields["method"] = methods[0]
        if file is None:
            _check_complete(fields)
        try:
            recipe = make_recipe(with_output({}, fields)) if file is None else read_recipe(file, fields)
        except RecipeError as error:
            if file is None or file.suffix in RECIPE_SUFFIXES:
                raise
            hint = f"Fix, if '{file}' is an expert: each needs its own flag, -e A -e B"
            raise RecipeError(f"{error.sentence}. {hint}") from None
        if statistics:
            recipe = _with_own(recipe, statistics_of(_listed(statistics)), "statistics")
        if stacks:
            name, words = split_name(",".join(_listed(stacks)))
            recipe = _with_own(recipe, dict.fromkeys([name] if name else recipe.labels, words), "stacks")
        choices = dict(parse_option(text) for text in options)
        if len(choices) < len(options):
            raise RecipeError("An option is given twice; list its values in one --option name=a,b.")
        recipes = variants(recipe, methods, choices, strengths)
        if not blocks:
            return recipes
        from actmat.extras.diffusion.blocks import with_blocks

        return [with_blocks(recipe, blocks) for recipe in recipes]


def _read_weights(texts: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """Values of --weight: one for each expert, and all that a single expert is to have in turn.

    Raises:
        RecipeError: one of several experts has a list.
    """
    from actmat.recipe import parse_option

    values = [parse_option(f"weight={text}")[1] for text in texts]
    if len(values) == 1:
        return values[0][:1], values[0]
    if several := [text for text, listed in zip(texts, values, strict=True) if len(listed) > 1]:
        raise RecipeError(
            f"--weight {several[0]} writes one output each of a single expert; found {len(texts)} experts."
        )
    return [weight for (weight,) in values], []


def _listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [str(value)]


def split_list(text: str) -> list[str]:
    """The parts of a list with commas, without those that are empty."""
    return [part.strip() for part in text.split(",") if part.strip()]


def split_name(text: str) -> tuple[str, str]:
    """Split `NAME=PLACE`; the name, which has no slash or backslash, may be empty."""
    name, equals, place = text.partition("=")
    return (name, place) if equals and not {"/", "\\"} & {*name} else ("", text)


def statistics_of(texts: Sequence[str]) -> dict[str, str] | list[str]:
    """Values of --statistics: a mapping if all are NAME=VALUE, else a list.

    Raises:
        RecipeError: a name is given twice.
    """
    pairs = [split_name(text) for text in texts]
    by_name = all(name for name, _ in pairs)
    if by_name and len(dict(pairs)) < len(pairs):
        raise RecipeError("--statistics is given twice for one expert.")
    return dict(pairs) if by_name else list(texts)


def _check_complete(fields: Mapping[str, Any]) -> None:
    """Raise if experts are missing, or the base of full checkpoints."""
    missing = [flag for flag, field in (("--base", "base"), ("--expert", "experts")) if not fields.get(field)]
    if missing == ["--expert"] and stack_parts(fields["base"]):
        return
    if missing and (missing != ["--base"] or fields.get("to") == "model"):
        no_base = " (adapters need no base)" if len(missing) == 2 else ""
        raise typer.BadParameter(f"give {' and '.join(missing)}{no_base}, or a recipe file (actmat merge RECIPE.yaml)")


def experts_of(places: Sequence[str], weights: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Recipe fields from the values of --expert (NAME=PATH or PATH) and --weight.

    Raises:
        RecipeError: the numbers of experts and weights differ.
    """
    if weights and len(weights) != len(places):
        raise RecipeError(f"Got {len(places)} experts and {len(weights)} weights; give one --weight per expert.")
    experts: list[dict[str, Any]] = []
    for i, text in enumerate(places):
        name, path = ("", text) if os.path.exists(text) else split_name(text)
        named = {"name": name} if name else {}
        experts.append({"path": path, **named} | ({"weight": weights[i]} if weights else {}))
    return experts


def _with_own(recipe: Recipe, values: Mapping[str, str] | Sequence[str], field: str) -> Recipe:
    from actmat.recipe import add_statistics, make_recipe

    experts = add_statistics([e.model_dump() for e in recipe.experts], values, field)
    return recipe.model_copy(update={"experts": make_recipe({"experts": experts}).experts})


# Parameters from types


@dataclass(frozen=True)
class FlagFields:
    """Annotation of a group of fields: the command takes `only` these, or all `without` these; `set`: by --set only."""

    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    set: tuple[str, ...] = ()


JsonQuiet = Annotated[OutputFlags, FlagFields(without=("full",))]
USUAL = OutputFlags()


@dataclass(frozen=True)
class _Field:
    """A field that a command takes: by its flag, or by --set where `flag` is None."""

    name: str
    help: str
    flag: inspect.Parameter | None = None


Texts = Mapping[str, Sequence[str]]
"""Field -> its values as --set gives them."""


@dataclass(frozen=True)
class _Flags:
    """Fields that together form one argument of a command, made of the values of flags and of --set."""

    fields: Sequence[_Field]
    make: Callable[[dict[str, Any], Texts], Any]

    @property
    def flags(self) -> list[inspect.Parameter]:
        return [f.flag for f in self.fields if f.flag is not None]

    def selected(self, by: FlagFields) -> _Flags:
        """The group of the fields that the command takes."""
        names = {f.name for f in self.fields}
        assert names >= {*by.only, *by.without, *by.set}, (
            f"no fields for { ({*by.only, *by.without, *by.set} - names) }"
        )
        taken = [f for f in self.fields if f.name not in by.without and (not by.only or f.name in by.only)]
        return _Flags([dataclasses.replace(f, flag=None) if f.name in by.set else f for f in taken], self.make)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace parameters of type `RecipeFlags` or a dataclass by one flag per field, and --set for fields without one.

    A field of the recipe is a flag if it is annotated with a `Flag`; a field of a dataclass if it is annotated with a
    `Flag` or with a `typer.Option`. --set takes the other fields of the recipe that hold a value or a list, and fields
    of dataclasses that are annotated with a `Setting`. `Annotated[..., FlagFields(...)]` selects some of them. Typer
    reads the new signature.
    """
    declared = inspect.signature(command, eval_str=True).parameters.values()
    groups = {p.name: group for p in declared if (group := _group(p.annotation)) is not None}
    if not groups:
        return command
    parameters: list[inspect.Parameter] = []
    for parameter in declared:
        group = groups.get(parameter.name)
        parameters += group.flags if group else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    settings = {f.name: f.help for group in groups.values() for f in group.fields if f.flag is None}
    if settings:
        parameters.append(_keyword("set", Set, None))
    if any(p.name == "experts" for p in parameters):
        parameters = _in_panels(parameters)

    @functools.wraps(command)
    def flat(**arguments: Any) -> None:
        texts = _texts(arguments.pop("set", None) or (), settings, parameters)
        for name, group in groups.items():
            settings_of_group = {f.name: texts[f.name] for f in group.fields if f.flag is None and f.name in texts}
            arguments[name] = group.make({p.name: arguments.pop(p.name) for p in group.flags}, settings_of_group)
        command(**arguments)

    vars(flat).update(settings=settings, __signature__=inspect.Signature(parameters))
    return flat


def _texts(listed: Sequence[str], settings: Mapping[str, str], flags: Sequence[inspect.Parameter]) -> Texts:
    """Values of --set by field.

    Raises:
        RecipeError: a name is unknown, or has a flag.
    """
    texts: dict[str, list[str]] = {}
    for text in listed:
        name, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(f"--set takes NAME=VALUE, found '{text[:100]}'.")
        texts.setdefault(name.strip(), []).append(value.strip())
    if unknown := [name for name in texts if name not in settings]:
        from actmat.methods import all_methods

        names = {flag.name: spelled(flag) for flag in flags} | dict.fromkeys(settings, "")
        if "options" in names:
            names = {o: f"-o {o}=VALUE" for method in all_methods() for o in method.options} | names
        near = did_you_mean(unknown[0], names)
        flag = next((f" Its flag is {flag}." for n, flag in names.items() if flag and f"'{n}'" in near), "")
        expected = "" if near else f" Expected one of {', '.join(settings)}."
        raise RecipeError(f"--set takes no '{unknown[0]}'.{near}{flag}{expected}")
    return texts


def spelled(flag: inspect.Parameter) -> str:
    """The long spelling of a flag."""
    option = typing.get_args(flag.annotation)[1]
    declared = (option.default, *(option.param_decls or ()))  # typer keeps the first where a default would stand
    return next((d for d in declared if isinstance(d, str) and d.startswith("--")), f"--{flag.name}")


METAVARS: Mapping[Any, str] = {bool: "", list[str] | None: "TEXT", str | None: "TEXT", int | None: "NUMBER",
                               float | None: "NUMBER", str: "TEXT", int: "NUMBER"}  # fmt: skip
"""Type of a flag -> how the help names its value; a switch has none."""


def _in_panels(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Sort arguments first, then options by their panel in `PANELS`, the others in a last panel."""
    panels = {name: panel for panel, names in PANELS.items() for name in names}
    for parameter in parameters:
        kind, option = typing.get_args(parameter.annotation)[:2]
        if isinstance(option, OptionInfo):
            option.rich_help_panel = option.rich_help_panel or panels.get(parameter.name, "More")
            if option.metavar is None and kind in METAVARS:
                option.metavar = METAVARS[kind]
    ranks = {name: rank for rank, name in enumerate(panels, start=1)}
    arguments = {p.name: 0 for p in parameters if not isinstance(typing.get_args(p.annotation)[1], OptionInfo)}
    return sorted(parameters, key=lambda p: (ranks | arguments).get(p.name, len(panels) + 1))


def _group(annotation: Any) -> _Flags | None:
    kind: Any
    kind, *marks = typing.get_args(annotation) if typing.get_origin(annotation) is Annotated else (annotation,)
    if kind is RecipeFlags:
        group = _of_recipe()
    elif dataclasses.is_dataclass(kind):
        group = _of_dataclass(kind)
    else:
        return None
    for fields in (m for m in marks if isinstance(m, FlagFields)):
        group = group.selected(fields)
    return group


def _of_recipe() -> _Flags:
    """Fields of a recipe, its output and its experts. Flags have no default, so that a recipe file can decide."""
    from actmat.recipe import ExpertRef, Recipe, parse_option
    from actmat.recipe.output import KINDS

    fields: dict[str, _Field] = {}
    models: tuple[type[BaseModel], ...] = (Recipe, ExpertRef, *KINDS.values())
    for model in models:
        for name, field in model.model_fields.items():
            flag = next((m for m in field.metadata if isinstance(m, Flag)), None)
            if name in fields or (flag is None and name in _NOT_SET):
                continue
            name = "to" if name == "output" else name
            text = _described((flag and flag.help) or _sentence(field.description or ""), field.default)
            parameter = None if flag is None else _parameter(name, field.annotation, flag, text, None)
            fields[name] = _Field(name, text, parameter)
    fields["blocks"] = _Field("blocks", BLOCKS, _parameter("blocks", str, Flag(repeated=True), BLOCKS, None))

    def make(flags: dict[str, Any], texts: Texts) -> RecipeFlags:
        chosen = {name: parse_option(f"{name}={values[-1]}")[1] for name, values in texts.items()}
        return RecipeFlags(flags | {name: v[0] if len(v) == 1 else v for name, v in chosen.items()})

    return _Flags(list(fields.values()), make)


def _of_dataclass(kind: Any) -> _Flags:
    hints = {
        n: h for n, h in typing.get_type_hints(kind, include_extras=True).items() if typing.get_origin(h) is Annotated
    }
    fields = []
    for field in dataclasses.fields(kind):
        annotation, mark, *_ = typing.get_args(hints.get(field.name)) or (None, None)
        if isinstance(mark, Setting):
            fields.append(_Field(field.name, _described(mark.help, field.default)))
        elif isinstance(mark, Flag):
            text = _described(mark.help, None)
            fields.append(_Field(field.name, text, _parameter(field.name, annotation, mark, text, field.default)))
        elif mark is not None:
            fields.append(_Field(field.name, str(mark.help), _keyword(field.name, hints[field.name], field.default)))

    def make(flags: dict[str, Any], texts: Texts) -> Any:
        return kind(**flags, **{name: _checked(name, values, hints[name]) for name, values in texts.items()})

    return _Flags(fields, make)


def _checked(name: str, texts: Sequence[str], hint: Any) -> Any:
    """The value of a setting; one that holds several takes all texts, another the last.

    Raises:
        RecipeError: it is no value of this type, or out of bounds.
    """
    from pydantic import Field, TypeAdapter, ValidationError

    kind, mark, *_ = typing.get_args(hint)
    bounded: Any = Annotated[kind, Field(ge=mark.low, le=mark.high)] if isinstance(mark, Setting) else kind
    value = tuple(texts) if typing.get_origin(kind) is tuple else texts[-1]
    try:
        return TypeAdapter(bounded).validate_python(value)
    except ValidationError as error:
        raise RecipeError(f"--set {name}={texts[-1][:100]}: {error.errors()[0]['msg']}.") from None


def _parameter(name: str, annotation: Any, flag: Flag, text: str, default: Any) -> inspect.Parameter:
    kind = flag.type or _typed(annotation)
    kind = types.GenericAlias(list, (kind,)) if flag.repeated else kind
    option = typer.Option(*(flag.names or (f"--{name.replace('_', '-')}",)), help=text, min=flag.low)
    return _keyword(name, Annotated[kind | None if default is None else kind, option], default)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _sentence(description: str) -> str:
    return f"{description[:1].upper()}{description[1:]}".replace("`", "'")


def _described(text: str, default: Any) -> str:
    """The text of a field with its default in parentheses, if it has one that says anything."""
    text, _, shown = text.removesuffix(".").partition("; default: ")
    if not shown and isinstance(default, str | int | float) and default not in ("", False):
        shown = str(default).lower() if default is True else str(default)
    return f"{text} (default: {shown})." if shown else f"{text}."


def _typed(annotation: Any) -> Any:
    """Type of a flag's value. Choices and structures stay strings, which the recipe's schema checks."""
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
