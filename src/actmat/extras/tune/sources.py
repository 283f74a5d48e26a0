"""Data sets of a merge with inputs: settings, and the rows of each expert."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actmat.errors import RecipeError
from actmat.extras.collect.data import (
    MESSAGES,
    READERS,
    SAMPLES,
    SELF,
    TEXT_COLUMNS,
    DataOptions,
    Row,
    by_expert,
    class_names,
    is_contrastive,
    prepare_data,
)
from actmat.extras.models.loading import Loaded
from actmat.extras.tune.live import Loader
from actmat.extras.tune.memory import place_models
from actmat.extras.tune.written import MOST
from actmat.recipe import Recipe
from actmat.settings import RunSettings

PROMPT = "text:"
"""Beginning of a prompt without a space."""


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """Settings of models that run on inputs.

    Args:
        reading: options of every data set, whose location is replaced.
        new_tokens: tokens of an expert's own answer to a text, at most.
        model_class, model_dtype: of the models while they run.
        keep_statistics: keep the folder `OUT.statistics`.
        template: around every text, {} is its place; or expert -> its own.
        loaded: models in memory, by the places that recipes give them.
    """

    reading: DataOptions = field(default_factory=lambda: DataOptions("", max_samples=SAMPLES))
    new_tokens: int = 32
    model_class: str | None = None
    model_dtype: str = "auto"
    keep_statistics: bool = False
    template: str | Mapping[str, str] | None = None
    loaded: Mapping[str, Loaded] = field(default_factory=dict)

    def loader(self, base: str, run: RunSettings) -> Loader:
        """Loads the models."""
        return Loader(base, self.model_class, place_models(run, self.model_dtype), self.loaded.get)

    def source(self, data: Any, *, measured: bool) -> DataOptions:
        """A data set, or the inputs themselves; `samples` limits what is measured, not what is compared.

        Raises:
            RecipeError: inputs of an unknown form.
        """
        if isinstance(data, DataOptions):
            reading = data
        else:
            reading = self.reading if measured else dataclasses.replace(self.reading, max_samples=SAMPLES)
            reading = dataclasses.replace(reading, location=str(data))
        if isinstance(data, list | tuple):
            return dataclasses.replace(reading, location=f"{len(data)} inputs given", rows=tuple(map(_as_row, data)))
        file, _, column = reading.location.rpartition(":")
        if Path(file).suffix in READERS and column.isidentifier():
            return dataclasses.replace(reading, location=file, text_column=column)
        if not reading.rows and is_prompt(reading.location):
            rows = (_as_row(reading.location.removeprefix(PROMPT)),)
            return dataclasses.replace(reading, location="the prompt given", rows=rows)
        return reading

    def templates(self, recipe: Recipe) -> dict[str, str]:
        """Expert -> the template around its texts.

        Raises:
            RecipeError: a template without `{}`, or of an expert that the merge does not have.
        """
        templates = by_expert(recipe, self.template) if self.template else {}
        for label, template in templates.items():
            if "{}" not in template:
                raise RecipeError(f"The template of '{label}' needs {{}} in the place of the text; got {template!r}.")
        return templates


def is_prompt(text: str) -> bool:
    """True for a text itself, which has a space or begins with `text:`; False for the place of a data set.

    >>> is_prompt("What is 2 + 2?"), is_prompt("text:hello"), is_prompt("hello"), is_prompt("my data/math.jsonl")
    (True, True, False, False)
    """
    is_file = Path(text).suffix in READERS or text.startswith(("/", "./", "../", "~"))
    return text.startswith(PROMPT) or (len(text.split()) > 1 and not is_file and not os.path.exists(text))


def _as_row(row: Any) -> Row:
    """The row of a text, of a chat, or of columns.

    Raises:
        RecipeError: it is none of these.
    """
    if isinstance(row, str):
        return {TEXT_COLUMNS[0]: row}
    if isinstance(row, Mapping) or (isinstance(row, list) and all(isinstance(m, Mapping) for m in row)):
        return row if isinstance(row, Mapping) else {MESSAGES: row}
    raise RecipeError(f"An input is a {type(row).__name__}; expected a text, a chat (list of messages), or a row.")


@dataclass(frozen=True)
class DataRows:
    """A data set and its rows, which were read."""

    options: DataOptions
    rows: Sequence[Row]


def read_sources(
    recipe: Recipe, data: Any, settings: InputSettings, config: Mapping[str, Any], *, measured: bool
) -> dict[str, DataRows]:
    """Expert -> its rows; images have classes by the names of their folders if the base compares images with texts.

    Raises:
        RecipeError: data of unknown experts, or of not every expert if the data is `measured`.
        StatisticsError: data that cannot be read.
    """
    named = {n: settings.source(d, measured=measured) for n, d in by_expert(recipe, data).items()}
    for label, template in settings.templates(recipe).items():
        if label in named:
            named[label] = dataclasses.replace(named[label], template=template)
    if measured:
        check_every_expert(recipe, named)
    options = {label: with_classes(label, source, config) for label, source in named.items()}
    rows = prepare_data({label: o for label, o in options.items() if o.location != SELF})
    for label, source in options.items():
        if source.location == SELF:
            options[label] = dataclasses.replace(source, max_samples=min(source.max_samples or MOST, MOST))
            rows[label] = [{}] * (options[label].max_samples or 0)  # which the expert is to write
    return {label: DataRows(o, rows[label]) for label, o in options.items()}


def check_every_expert(recipe: Recipe, data: Mapping[str, Any]) -> None:
    """Raise `RecipeError` for experts without data."""
    if missing := [label for label in recipe.labels if label not in data]:
        problems = [f"no data is given for '{m}'. Fix: --data {m}=INPUTS, a prompt or a file" for m in missing]
        raise RecipeError("Every expert needs inputs of its own.", problems)


def with_classes(label: str, source: DataOptions, config: Mapping[str, Any]) -> DataOptions:
    """The data with the classes of its images, by the names of their folders, if the base compares images with texts.

    Raises:
        RecipeError: images without classes, or classes for a model of another kind.
    """
    if not is_contrastive(config):
        if source.classes:
            raise RecipeError("classes need a model that compares images with texts, such as CLIP.")
        return source
    classes = source.classes or class_names(source.location)
    if not classes and Path(source.location).is_dir():
        raise RecipeError(
            f"The image classes of '{label}' are unknown: --set classes={label}=a,b,c, or give a folder of images with "
            "one subfolder per class."
        )
    return dataclasses.replace(source, classes=classes)
