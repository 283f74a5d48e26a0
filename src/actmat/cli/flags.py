"""Flags of commands: shared ones, those of a recipe's fields, those of the fields of a dataclass of settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from typer.models import OptionInfo

from actmat.checkpoints.layer_names import stack_parts
from actmat.errors import RecipeError, did_you_mean
from actmat.flag import Flag
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from pydantic import BaseModel

    from actmat.extras.collect.data import DataOptions
    from actmat.recipe import Recipe

RunDtype = Literal["float32", "bfloat16", "float16", "float64"]
"""Dtypes in which a model can run."""

PANELS: Mapping[str, tuple[str, ...]] = {
    "Options": (
        *("base", "experts", "method", "options", "scale", "out", "plan", "json", "full", "quiet"),
        *("data", "check", "weight", "overwrite", "diagnose"),
    ),
    "What is merged": (
        *("keep", "drop", "space", "post", "statistics", "vocabulary", "average", "set"),
    ),
    "What is written": ("dtype", "to", "rank"),
    "Where it runs": (
        *("device", "device_memory", "max_memory", "threads", "executor"),
    ),
    "Measures": ("strict",),
}  # fmt: skip
"""Help panels of a command that takes a recipe, in order -> names of their parameters."""

FIRST = (
    *PANELS["Options"],
    *("minutes", "budget", "methods", "scales", "score", "prompt", "images", "lm_eval", "compare", "as_recipe"),
)
"""Parameters that `--help` of such a command describes; it lists the other flags by name only."""

RecipeArgument = Annotated[
    Path | None, typer.Argument(metavar="[RECIPE.yaml]", help="A recipe file; flags replace its fields.")
]
RECIPE_SUFFIXES = (".yaml", ".yml", ".json")
"""Endings of recipe files."""
_SETTINGS = ("durable", "sha256")
"""Run settings that have no flag and are set with `--set`."""
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other field of a recipe, such as seed=3 or scope=all; see docs/formats/recipe.md. Repeatable.",
    ),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit with 1 if a check of severity 'issue' found something.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Full = Annotated[bool, typer.Option("--full", help="With --json: include lists with one row per tensor.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors and output for scripts.")]
"""Print no text for people. Scripts still get JSON (with --json) and the output that a command exists for:
the recipe of `plan --as-recipe`, the command of `inspect --serve`, the answers of `try`, the address of `ui`."""


@dataclass(frozen=True)
class OutputFlags:
    """Flags for the form of the output."""

    json: Json = False
    full: Full = False
    quiet: Quiet = False


def _data_option(flag: str, text: str, **more: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel="Data and the models that run on it", **more)


ModelClass = Annotated[
    str | None, _data_option("--model-class", "Transformers class that loads the model (default: the config's).")
]
SplitOption = Annotated[str, _data_option("--split", "Split of a data set on the hub or in a folder.")]
Subset = Annotated[str | None, _data_option("--subset", "Configuration of a data set on the hub.")]
TextColumn = Annotated[str | None, _data_option("--text-column", "Column of texts (default: detected).")]
ImageColumn = Annotated[str | None, _data_option("--image-column", "Column of images (default: detected).")]
TargetColumn = Annotated[
    str | None, _data_option("--target-column", "Column of the decoder's texts, for encoder-decoder models.")
]
BatchSize = Annotated[int, _data_option("--batch-size", "Samples in one forward pass.")]
MaxLength = Annotated[int, _data_option("--max-length", "Maximum number of tokens per text.")]
ModelDtype = Annotated[RunDtype, _data_option("--dtype", "Dtype of the model while it runs.")]


@dataclass(frozen=True)
class ReadingFlags:
    """Flags of reading a data set."""

    split: SplitOption = "train"
    subset: Subset = None
    text_column: TextColumn = None
    image_column: ImageColumn = None
    target_column: TargetColumn = None
    batch_size: BatchSize = 8
    max_length: MaxLength = 512

    def options(self, location: str, **more: Any) -> DataOptions:
        """Options to read the data set at `location`, and `more` fields of them."""
        from actmat.extras.collect.data import DataOptions

        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(ReadingFlags)}
        return DataOptions(location, **given | more)


@dataclass(frozen=True)
class DataFlags(ReadingFlags):
    """Flags for reading data and for loading the models that run on it."""

    data: Annotated[
        list[str] | None,
        _data_option(
            "--data",
            "Unlabeled inputs for comparing a merged model with its experts: prompt, file, folder or hub id; "
            "NAME=DATA for one expert.",
        ),
    ] = None
    samples: Annotated[int, _data_option("--samples", "Maximum number of samples per expert.", min=1)] = 64
    new_tokens: Annotated[
        int, _data_option("--new-tokens", "Tokens of a language model's answer to an input.", min=0)
    ] = 32
    model_class: ModelClass = None
    dtype: ModelDtype = "float32"


@dataclass(frozen=True)
class InputFlags(ReadingFlags):
    """Inputs of the experts of a merge; the fields without a flag are set with --set."""

    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="NAME=INPUTS",
            help="Inputs of expert NAME's task, without labels: a prompt, better eight in a file (.jsonl, .csv, "
            ".txt), or images. 'auto' measures; a quarter compares answers.",
        ),
    ] = None
    check: Annotated[
        list[str] | None,
        typer.Option(
            "--check",
            metavar="NAME=INPUTS",
            help="Inputs on which the answers of the merge are compared with those of expert NAME.",
        ),
    ] = None
    label_column: str | None = None
    samples: int = 64
    new_tokens: int = 16
    model_class: str | None = None
    model_dtype: RunDtype = "float32"
    keep_statistics: bool = False
    tune_scale: bool = False


_OF_INPUTS = tuple(field.name for field in dataclasses.fields(InputFlags) if field.name not in ("data", "check"))
Changed = TypeVar("Changed", bound=RunSettings | InputFlags)

# Recipes


@dataclass(frozen=True)
class RecipeFlags:
    """Values of recipe flags by field of `Recipe` and `ExpertRef`; None for a flag that is not given.

    `more`: names that --set takes beside fields of the recipe.
    """

    values: Mapping[str, Any]
    more: tuple[str, ...] = _SETTINGS

    def __contains__(self, field: str) -> bool:
        return self.values.get(field) not in (None, [])

    @property
    def given(self) -> dict[str, Any]:
        """The given flags except `--set`."""
        return {name: value for name, value in self.values.items() if name in self and name != "set"}

    def _set(self) -> dict[str, Any]:
        """Recipe fields and run settings of `--set`.

        Raises:
            RecipeError: a name is unknown, or has a flag of its own.
        """
        from actmat.recipe import Recipe, parse_option
        from actmat.recipe.output import settable_fields

        pairs = map(parse_option, self.values.get("set") or ())  # the last of two equal names counts
        found = {name: values[0] if len(values) == 1 else values for name, values in pairs}
        known = (*settable_fields(Recipe), *self.more)
        if strange := [name for name in found if name not in known]:
            from actmat.methods import all_methods

            fields = {o: f"-o {o}=VALUE" for method in all_methods() for o in method.options}
            fields |= {n: f"--{n}" for n in (*Recipe.model_fields, "weight", "expert")} | dict.fromkeys(known, "")
            word = did_you_mean(strange[0], fields)
            near = next((f"{word} Its flag is {f}." for n, f in fields.items() if f and f"'{n}'" in word), word)
            raise RecipeError(f"--set {strange[0]}: expected one of {', '.join(known)}.{near}")
        return found

    def with_settings(self, given: Changed) -> Changed:
        """Run settings, or flags of inputs, updated from `--set`."""
        names = {field.name for field in dataclasses.fields(given)} & set(self.more)
        return dataclasses.replace(given, **{name: value for name, value in self._set().items() if name in names})

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

        given = self.given
        weights, statistics = given.pop("weight", None), given.pop("statistics", None)
        given |= {name: value for name, value in self._set().items() if name not in self.more}
        stacks = given.pop("stacks", None)
        methods, options = given.pop("method", []), given.pop("options", [])
        if "experts" in given:
            given["experts"] = experts_of(given["experts"], weights)
        elif weights:
            raise RecipeError("--weight needs one --expert each; in a recipe file, set each expert's 'weight'.")
        if "out" in given:
            given["out"] = str(given["out"])
        if len(methods) == 1:
            given["method"] = methods[0]
        if file is None:
            _check_complete(given)
        try:
            recipe = make_recipe(with_output({}, given)) if file is None else read_recipe(file, given)
        except RecipeError as error:
            if file is None or "experts" not in given or file.suffix in RECIPE_SUFFIXES:
                raise
            hint = f"Fix, if '{file}' is an expert: each needs its own flag, -e A -e B"
            raise RecipeError(f"{error.sentence}. {hint}") from None
        if statistics:
            recipe = _with_own(recipe, statistics_of(statistics), "statistics")
        if stacks:
            name, words = split_name(",".join(stacks) if isinstance(stacks, list) else str(stacks))
            recipe = _with_own(recipe, dict.fromkeys([name] if name else recipe.labels, words), "stacks")
        choices = dict(parse_option(text) for text in options)
        if len(choices) < len(options):
            raise RecipeError("An option is given twice; list its values in one --option name=a,b.")
        return variants(recipe, methods, choices)


def split_name(text: str) -> tuple[str, str]:
    """Split `NAME=PLACE`; the name, which has no slash or backslash, may be empty."""
    name, equals, place = text.partition("=")
    return (name, place) if equals and not {"/", "\\"} & {*name} else ("", text)


def statistics_of(given: Sequence[str], field: str = "statistics") -> dict[str, str] | list[str]:
    """Values of --statistics or a similar flag: a mapping if all are NAME=VALUE, else a list.

    Raises:
        RecipeError: a name is given twice.
    """
    pairs = [split_name(text) for text in given]
    by_name = all(name for name, _ in pairs)
    if by_name and len(dict(pairs)) < len(pairs):
        raise RecipeError(f"--{field} is given twice for one expert.")
    return dict(pairs) if by_name else list(given)


def _check_complete(given: Mapping[str, Any]) -> None:
    """Raise if experts are missing, or the base of full checkpoints."""
    missing = [flag for flag, field in (("--base", "base"), ("--expert", "experts")) if not given.get(field)]
    if missing == ["--expert"] and stack_parts(given["base"]):
        return
    if missing and (missing != ["--base"] or given.get("to") == "model"):
        no_base = " (adapters need no base)" if len(missing) == 2 else ""
        raise typer.BadParameter(f"give {' and '.join(missing)}{no_base}, or a recipe file (actmat merge RECIPE.yaml)")


def experts_of(given: Sequence[str], weights: Sequence[float] | None) -> list[dict[str, Any]]:
    """Recipe fields from the values of --expert (NAME=PATH or PATH) and --weight.

    Raises:
        RecipeError: the numbers of experts and weights differ.
    """
    if weights and len(weights) != len(given):
        raise RecipeError(f"Got {len(given)} experts and {len(weights)} weights; give one --weight per expert.")
    experts: list[dict[str, Any]] = []
    for i, text in enumerate(given):
        name, path = ("", text) if os.path.exists(text) else split_name(text)
        named = {"name": name} if name else {}
        experts.append({"path": path, **named} | ({"weight": weights[i]} if weights else {}))
    return experts


def _with_own(recipe: Recipe, given: Mapping[str, str] | Sequence[str], field: str) -> Recipe:
    from actmat.recipe import add_statistics, make_recipe

    experts = add_statistics([e.model_dump() for e in recipe.experts], given, field)
    return recipe.model_copy(update={"experts": make_recipe({"experts": experts}).experts})


# Parameters from types


@dataclass(frozen=True)
class FlagFields:
    """Annotation of a group of flags: the command takes `only` these fields, or all fields `without` these."""

    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class _FlagGroup:
    """Flags that together form one argument of a command."""

    parameters: list[inspect.Parameter]
    make: Callable[[dict[str, Any]], Any]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace parameters of type `RecipeFlags` or a dataclass by one flag per field.

    A field of the recipe is a flag if it is annotated with a `Flag`; a field of a dataclass if it is annotated with a
    `Flag` or with a `typer.Option`. `Annotated[..., FlagFields(...)]` selects some of them. Typer reads the new
    signature.
    """
    declared = inspect.signature(command, eval_str=True).parameters.values()
    groups = {p.name: group for p in declared if (group := _group(p.annotation)) is not None}
    if not groups:
        return command
    parameters: list[inspect.Parameter] = []
    for parameter in declared:
        group = groups.get(parameter.name)
        parameters += group.parameters if group else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    if any(kind is RecipeFlags for p in declared for kind in (p.annotation, *typing.get_args(p.annotation)[:1])):
        parameters = _in_panels(parameters)

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group.make({p.name: given.pop(p.name) for p in group.parameters})
        fields = next((g for g in given.values() if isinstance(g, RecipeFlags)), None)
        if fields is not None:
            if any(isinstance(g, InputFlags) for g in given.values()):
                fields = dataclasses.replace(fields, more=(*_SETTINGS, *_OF_INPUTS))
            given |= {n: fields for n, g in given.items() if isinstance(g, RecipeFlags)}
            given |= {n: fields.with_settings(g) for n, g in given.items() if isinstance(g, RunSettings | InputFlags)}
        command(**given)

    vars(flat)["takes_recipe"] = any(p.name == "experts" for p in parameters)
    vars(flat)["__signature__"] = inspect.Signature(parameters)
    return flat


def _in_panels(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Sort arguments first, then options by their panel in `PANELS`, the others in a last panel."""
    panels = {name: panel for panel, names in PANELS.items() for name in names}
    for parameter in parameters:
        option = typing.get_args(parameter.annotation)[1]
        if isinstance(option, OptionInfo) and option.rich_help_panel is None:
            option.rich_help_panel = panels.get(parameter.name, "More")
    ranks = {name: rank for rank, name in enumerate(panels, start=1)}
    arguments = {p.name: 0 for p in parameters if not isinstance(typing.get_args(p.annotation)[1], OptionInfo)}
    return sorted(parameters, key=lambda p: (ranks | arguments).get(p.name, len(panels) + 1))


def _group(annotation: Any) -> _FlagGroup | None:
    kind: Any
    kind, *marks = typing.get_args(annotation) if typing.get_origin(annotation) is Annotated else (annotation,)
    if kind is RecipeFlags:
        from actmat.recipe import Recipe

        group = _FlagGroup(list(_of_model(Recipe)), RecipeFlags)
    elif dataclasses.is_dataclass(kind):
        make: Any = kind
        group = _FlagGroup(list(_of_dataclass(kind)), lambda given: make(**given))
    else:
        return None
    for fields in (m for m in marks if isinstance(m, FlagFields)):
        unknown = {*fields.only, *fields.without} - {p.name for p in group.parameters}
        assert not unknown, f"{kind.__name__} has no flags for {unknown}"
        kept = [p for p in group.parameters if p.name not in fields.without]
        group = _FlagGroup([p for p in kept if not fields.only or p.name in fields.only], group.make)
    return group


def _of_model(model: type[BaseModel]) -> Iterator[inspect.Parameter]:
    """Yield flags of a recipe's fields. Their default is None, so that a recipe file can decide."""
    from actmat.recipe import ExpertRef, Recipe
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
    if model is Recipe:
        yield _keyword("set", Set, None)


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
    """Format a default as on the command line; a switch's default is its name."""
    if isinstance(default, bool):
        on, _, off = flag.names[0].partition("/") if flag.names else ("", "", "")
        return on if default else off
    return str(default) if isinstance(default, str | int | float) else ""


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
