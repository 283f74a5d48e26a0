"""Public functions live in `api`; their keyword arguments are typed, as the recipe and the settings have them."""

import dataclasses
import inspect
import types
import typing
from typing import Any, Literal

import pytest
import torch

import actmat
from actmat.api import fields as declared
from actmat.cli.data import InputFlags, ReadingFlags
from actmat.errors import RecipeError
from actmat.extras.collect.data import DataOptions
from actmat.extras.tune.settings import TuneSettings
from actmat.extras.tune.sources import InputSettings
from actmat.methods import AnyMethod
from actmat.methods.spaces import Space
from actmat.progress import Progress
from actmat.recipe import Recipe
from actmat.recipe.output import KINDS, OF_OUTPUTS, TO
from actmat.recipe.schema import OutputDtype, Scope
from actmat.settings import RunSettings

FUNCTIONS = {n: f for n in actmat.__all__ if isinstance(f := getattr(actmat, n), types.FunctionType)}
OPTIONS = {"export": "options of a format", "merge_matrices": "options of a method"}
"""Functions whose keyword arguments are not fixed -> their meaning."""
NAMES: dict[str, Any] = {
    "AnyMethod": AnyMethod, "Loaded": Any, "Location": str, "OutputDtype": OutputDtype, "Predict": Any,
    "Progress": Progress, "Scope": Scope, "Score": Any, "Space": Space,
}  # fmt: skip
"""Names that `api.fields` imports for type checkers only."""
ARGUMENTS = {"base", "experts", "method", "out"}
"""Fields of a recipe that are parameters of their own."""


def keys(kind: type) -> set[str]:
    return set(vars(kind)["__optional_keys__"])


def choices(annotation: Any) -> set[str]:
    """Texts of all `Literal` in a type."""
    parts = typing.get_args(annotation)
    return set(parts) if typing.get_origin(annotation) is Literal else set().union(*map(choices, parts))


def test_public_functions_live_in_api() -> None:
    homes = {name: actmat._HOME[name] for name in FUNCTIONS}
    assert len(homes) == 17
    assert {name for name, home in homes.items() if not home.startswith("actmat.api.")} == set()
    elsewhere = {name for name, function in FUNCTIONS.items() if function.__module__ != homes[name]}
    assert elsewhere == {"open_model"}, "it is of a lower layer, which needs it too"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_keyword_arguments_have_types(name: str) -> None:
    signature = inspect.signature(FUNCTIONS[name])
    rest = [p.annotation for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    assert all(p.annotation is not p.empty for p in signature.parameters.values())
    assert [text for text in rest if not text.startswith("Unpack[")] == ([] if name not in OPTIONS else rest)
    fields = [getattr(declared, text.removeprefix("Unpack[").removesuffix("]")) for text in rest if name not in OPTIONS]
    assert not [f for kind in fields for f in keys(kind) & signature.parameters.keys()]


def test_fields_are_those_of_recipes_and_settings() -> None:
    run = {f.name for f in dataclasses.fields(RunSettings)} - {"held"}
    recipe = {*Recipe.model_fields} - ARGUMENTS
    assert keys(declared.RunFields) == run
    assert keys(declared.MergeFields) == run | recipe | {*OF_OUTPUTS, "to", "blocks"}
    inputs = {f.name for f in dataclasses.fields(InputSettings)} - {"reading", "loaded"}
    assert keys(declared.InputFields) - keys(declared.MergeFields) == inputs | {"check"}
    search = {f.name for f in dataclasses.fields(TuneSettings)} - {"device"}
    assert keys(declared.ScaleFields) == keys(declared.MergeFields) - {"blocks"} | search | {"method"}
    assert keys(declared.ScaleFields) - keys(declared.TuneFields) == {"space"}, "the candidates of `tune`"
    parameters = inspect.signature(actmat.merge).parameters.keys() - {"base", "experts", "out", "fields"}
    assert keys(declared.MergeArguments) == keys(declared.InputFields) | parameters


def test_choices_are_those_of_recipes() -> None:
    hints = typing.get_type_hints(declared.MergeFields, localns=NAMES)
    fields: dict[str, Any] = {n: f.annotation for kind in KINDS.values() for n, f in kind.model_fields.items()}
    fields |= {name: field.annotation for name, field in Recipe.model_fields.items()}
    closed = {name for name, hint in hints.items() if choices(hint)}
    assert closed == {"scope", "space", "dtype", "compute_dtype", "ranks", "others", "to"}
    for name in closed - {"to"}:
        assert choices(hints[name]) == choices(fields[name]), name
    assert choices(hints["to"]) == {*KINDS, *TO}


MERGE = {"base": "b", "experts": ["e"]}
TUNE = {**MERGE, "data": "d", "out": "o"}
PLACES: dict[str, dict[str, Any]] = {
    "merge": MERGE, "plan": MERGE, "diagnose": MERGE, "average": {"checkpoints": ["a", "b"], "out": "o"},
    "extract": {"base": "b", "model": "m", "out": "o", "rank": 2}, "tune": TUNE, "tune_scale": TUNE,
    "merge_adapters": {"model": torch.nn.Linear(2, 2), "adapters": ["a"], "name": "x"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        *((name, "thraeds", "threads") for name in PLACES),
        ("merge", "scael", "scale"),
        ("merge", "new_token", "new_tokens"),
        ("tune", "minuts", "minutes"),
        ("tune_scale", "spaec", "space"),
    ],
)
def test_a_misspelt_name_is_an_error_with_a_suggestion(name: str, wrong: str, right: str) -> None:
    with pytest.raises(RecipeError, match=f"there is no field '{wrong}'. Did you mean '{right}'?"):
        FUNCTIONS[name](**PLACES[name], **{wrong: 1})
    assert PLACES.keys() == {n for n, f in FUNCTIONS.items() if "Unpack[" in str(inspect.signature(f))}


def test_settings_for_reading_data_have_their_names() -> None:
    options = ReadingFlags(split="test", samples=3).options("place", 64, classes=("a",))
    assert options == DataOptions("place", split="test", max_samples=3, classes=("a",))
    assert InputFlags().settings() == InputSettings()
