"""Keyword arguments of the public functions: fields of a recipe and settings of a run, with types for editors.

`tests/house/test_public_functions.py` compares them with `recipe.Recipe`, its outputs and `settings.RunSettings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from actmat.errors import RecipeError, did_you_mean

if TYPE_CHECKING:
    from actmat.extras.models.loading import Loaded
    from actmat.extras.tune.evaluate import Predict, Score
    from actmat.methods import AnyMethod
    from actmat.methods.spaces import Space
    from actmat.progress import Progress
    from actmat.recipe.arguments import Location
    from actmat.recipe.schema import OutputDtype, Scope

Fields = Mapping[str, Any]
Dtype = Literal["float32", "float64"]


class RunFields(TypedDict, total=False):
    """Settings of a run, see `settings.RunSettings`."""

    device: str
    device_memory: str | int | None
    max_memory: str | int | None
    threads: int | None
    overwrite: bool
    durable: bool
    diagnose: bool
    executor: str | None


class AverageFields(RunFields, total=False):
    """Fields of an average, and settings of its run."""

    ties: bool
    dtype: OutputDtype | None
    compute_dtype: Dtype
    max_shard_size: str | int
    keep: str | Sequence[str]
    drop: str | Sequence[str]
    vocabulary: str | Fields | None
    files_from: str | None
    config_from: str | None


class SearchedFields(AverageFields, total=False):
    """Fields of a merge whose space is searched, and settings of its run."""

    options: Fields
    normalize: bool
    scale: float | Fields | Sequence[Fields]
    scope: Scope
    rules: Sequence[Fields]
    roles: Sequence[Fields]
    post: str | Fields | Sequence[str | Fields]
    seed: int
    output: str | Fields | None
    to: Literal["model", "adapter", "extracted", "peft", "kohya", "diffusers", "comfy"]
    chat_template: str | None
    rank: int | None
    ranks: Literal["uniform", "pattern"]
    any_base: bool
    others: Literal["save", "leave"]
    mute: str | Sequence[str]
    measured_from: str | None
    notes: Sequence[str]
    warnings: Sequence[str]


class MergeFields(SearchedFields, total=False):
    """Fields of a recipe, see `recipe.Recipe`, settings of its run, and weights by block of image models."""

    space: Space
    blocks: str | Sequence[str]


class InputFields(MergeFields, total=False):
    """Fields of a merge, and settings of models that run on inputs."""

    check: Fields | Literal["self"] | None
    template: str | Mapping[str, str] | None
    new_tokens: int
    model_class: str | None
    model_dtype: str
    keep_statistics: bool


class MergeArguments(InputFields, total=False):
    """Arguments of `merge` besides base, experts and output."""

    method: AnyMethod
    weights: Sequence[float] | None
    statistics: Mapping[str, Location] | Sequence[Location] | None
    data: Fields | Literal["self"] | None
    progress: Progress | None


class TuneFields(SearchedFields, total=False):
    """Fields of a merge, and settings of a search, see `extras.tune.settings.TuneSettings`."""

    method: AnyMethod
    score: Score
    minutes: float | None
    budget: int | None
    least_agreement: float
    new_tokens: int
    model_class: str | None
    model_dtype: str
    predict: Predict | Mapping[str, Predict]
    load: Callable[[str], Loaded] | None
    average: bool
    keep_work: bool


class ScaleFields(TuneFields, total=False):
    """Fields of a search of the scale of a merge."""

    space: Space


def check_names(arguments: Mapping[str, object], fields: type) -> None:
    """Raise `RecipeError` for keyword arguments that are none of the fields, with the most similar name."""
    known: frozenset[str] = vars(fields)["__optional_keys__"]
    other = f" Fields: {', '.join(sorted(known))}"
    if unknown := [name for name in arguments if name not in known]:
        problems = [f"there is no field '{name}'.{did_you_mean(name, known) or other}" for name in unknown]
        raise RecipeError("Unknown keyword arguments.", problems)
