"""`actmat.tune` and `actmat.tune_scale`: searches from plain arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.api.merging import Location, make_arguments
from actmat.extras.collect.data import DataOptions, class_names, is_contrastive
from actmat.extras.collect.on_data import SAMPLES
from actmat.extras.tune.report import TuneReport
from actmat.extras.tune.search import parse_budget
from actmat.extras.tune.settings import TuneProgress, TuneSettings, usual_tune_progress
from actmat.extras.tune.space import Space, make_space
from actmat.extras.tune.tuning import TuneData, tune_recipe
from actmat.recipe import Recipe
from actmat.settings import RunSettings

__all__ = ["scale_space", "tune", "tune_scale", "usual_inputs"]

_SEARCH = frozenset(f.name for f in dataclasses.fields(TuneSettings)) - {"device", "dtype", "budget"}
_MOST = 2 * SAMPLES
"""Inputs per expert that are read of a location: half choose (some of these measure), half compare."""

Data = TuneData | Mapping[str, TuneData]


def tune(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    data: Data,
    out: Location,
    space: Space | Mapping[str, Any] | None = None,
    budget: str | int | None = None,
    progress: TuneProgress | None = None,
    **fields: Any,
) -> TuneReport:
    """Find the best merge of some experts from a few unlabelled inputs of each, and write it.

    Every method of the space is merged once; every scale is written into one model in memory and scored by the mean
    divergence `KL(expert || merged)` of the experts' own predictions on their inputs (docs/tune.md says how far to
    trust it). Half of the inputs are kept back to compare the chosen merge with the average.

    Args:
        base: as for `merge`; None: the one that the adapters name.
        experts: as for `merge`.
        data: expert -> its unlabelled inputs (32 to 256), or one data set for all: a location, `DataOptions`, or
            batches of keyword arguments of the model.
        out: directory to write; the search itself is described in `OUT.tune`.
        space: what is tried: `{"methods": [...], "scales": [...], "groups": "kind", "weights": True}`; default:
            twelve methods at six scales.
        budget: evaluations (200) or time ("15m").
        progress: receives callbacks.
        fields: fields of `TuneSettings` (`score`, `least_agreement`, `predict`, `load`, `model_class`, `new_tokens`,
            ...; `model_dtype` is the dtype of the models while they run), of a recipe, and of `RunSettings`.

    Returns:
        The report: the chosen recipe, all trials, the final comparison with intervals.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    recipe, settings, run = _arguments(base, experts, {"out": str(out), **fields}, budget)
    chosen = space if isinstance(space, Space) else make_space(space or {})
    return tune_recipe(recipe, chosen, usual_inputs(recipe, data), settings, run, progress or usual_tune_progress())


def tune_scale(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    data: Data,
    out: Location,
    scales: Sequence[float] | None = None,
    progress: TuneProgress | None = None,
    **fields: Any,
) -> TuneReport:
    """Merge as `merge` does, at the scale that unlabelled inputs of the experts choose.

    The method and its options are those of the arguments; it is merged once for the search and once for the output.
    In the end, the chosen scale is compared with the one that was asked for and with the base.

    Args:
        base, experts: as for `merge`.
        data: as for `tune`.
        out: directory to write; the search is described in `OUT.tune`.
        scales: to try first; default: six from 0.3 to 2. The best is refined within a factor of 1.5.
        progress: receives callbacks.
        fields: as for `tune`; `method` and `options` among them.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    recipe, settings, run = _arguments(base, experts, {"out": str(out), **fields}, None)
    settings = dataclasses.replace(settings, average=False)
    return tune_recipe(
        recipe,
        scale_space(recipe, scales),
        usual_inputs(recipe, data),
        settings,
        run,
        progress or usual_tune_progress(),
    )


def scale_space(recipe: Recipe, scales: Sequence[float] | None = None) -> Space:
    """The method of a recipe at several scales.

    >>> space = scale_space(Recipe(experts=("a", "b"), method="ties", options={"density": 0.3}), [0.5, 1.0])
    >>> [str(c) for c in space.merges()], space.scales
    (['ties[density=0.3]'], (0.5, 1.0))
    """
    method = {"method": recipe.method, "options": {name: [value] for name, value in recipe.options.items()}}
    return make_space({"methods": [method]} | ({} if scales is None else {"scales": list(scales)}))


def _arguments(
    base: Location | None,
    experts: Sequence[Location | Mapping[str, Any]],
    fields: dict[str, Any],
    budget: str | int | None,
) -> tuple[Recipe, TuneSettings, RunSettings]:
    """Recipe and settings from the fields of all three."""
    search = {k: fields.pop(k) for k in _SEARCH & fields.keys()} | {"dtype": fields.pop("model_dtype", "float32")}
    recipe, run = make_arguments(base, experts, fields)
    return recipe, TuneSettings(budget=parse_budget(budget), **search), run


def usual_inputs(recipe: Recipe, data: Data) -> dict[str, TuneData]:
    """Expert -> its data; of a location, as many inputs as are usual.

    Folders of images have their classes by name where the base compares images with texts.
    """
    given: Mapping[str, TuneData] = data if isinstance(data, Mapping) else dict.fromkeys(recipe.labels, data)
    places = {label: str(d) for label, d in given.items() if isinstance(d, str | Path)}
    classes = {label: class_names(place) for label, place in places.items()}
    named = any(classes.values()) and recipe.base is not None and is_contrastive(recipe.base)
    read = {
        label: DataOptions(place, max_samples=_MOST, classes=classes[label] if named else ())
        for label, place in places.items()
    }
    return {label: read.get(label, d) for label, d in given.items()}
