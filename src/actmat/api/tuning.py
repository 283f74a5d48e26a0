"""Find the best merge of some experts, or its scale, from a few unlabeled inputs of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from actmat.api.fields import ScaleFields, TuneFields, check_names
from actmat.extras.tune.report import TuneReport
from actmat.extras.tune.settings import TuneSettings
from actmat.extras.tune.space import SearchSpace, make_space, scale_space
from actmat.extras.tune.tuning import tune_recipe
from actmat.progress import Progress, usual_progress
from actmat.recipe import Recipe
from actmat.recipe.arguments import Experts, Location, make_arguments
from actmat.settings import RunSettings

_SEARCH = frozenset(f.name for f in dataclasses.fields(TuneSettings)) - {"device"}


def tune(
    base: Location | None = None,
    experts: Experts = (),
    *,
    data: Any,
    out: Location,
    space: SearchSpace | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **fields: Unpack[TuneFields],
) -> TuneReport:
    """Find the best merge of some experts from a few unlabeled inputs of each, and write it.

    It begins with RegMean on some of the inputs, at scale 1. Then every method of the space is merged once, scales are
    formed in memory, and all is scored by the mean divergence `KL(expert || merged)` of the experts' own predictions on
    their inputs (how far to trust it: docs/tune-results.md). Half of the inputs are kept back to compare the chosen
    merge with the average.

    Args:
        base: as for `merge`; None: the one that the adapters name.
        experts: as for `merge`.
        data: expert -> its unlabeled inputs (8 to 256), or one data set for all: a location, a prompt, `DataOptions`,
            or batches of keyword arguments of the model.
        out: directory to write; the search itself is described in `OUT.tune`.
        space: the candidates: `{"methods": [...], "scales": [...]}`; default: five methods, of adapters three, at up
            to six scales.
        progress: receives callbacks.
        fields: fields of `TuneSettings` (`minutes`, `score`, `least_agreement`, `predict`, `load`, `model_class`,
            `new_tokens`, ...; `model_dtype` is the dtype of the models while they run), of a recipe, and of
            `RunSettings`.

    Returns:
        The report: the chosen recipe, all trials, the final comparison with intervals.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    recipe, settings, run = _arguments(base, experts, out, fields, TuneFields)
    chosen = space if isinstance(space, SearchSpace) else make_space(space or {})
    return tune_recipe(recipe, chosen, data, settings, run, progress or usual_progress())


def tune_scale(
    base: Location | None = None,
    experts: Experts = (),
    *,
    data: Any,
    out: Location,
    scales: Sequence[float] | None = None,
    progress: Progress | None = None,
    **fields: Unpack[ScaleFields],
) -> TuneReport:
    """Merge as `merge` does, at the scale that unlabeled inputs of the experts choose.

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
    recipe, settings, run = _arguments(base, experts, out, fields, ScaleFields)
    settings = dataclasses.replace(settings, average=False)
    space = functools.partial(scale_space, scales=scales)
    return tune_recipe(recipe, space, data, settings, run, progress or usual_progress())


def _arguments(
    base: Location | None,
    experts: Experts,
    out: Location,
    fields: Mapping[str, object],
    known: type,
) -> tuple[Recipe, TuneSettings, RunSettings]:
    """Recipe and settings from the fields of all three."""
    check_names(fields, known)
    arguments: dict[str, Any] = {"out": str(out), **fields}
    search = {k: arguments.pop(k) for k in _SEARCH & arguments.keys()}
    recipe, run = make_arguments(base, experts, arguments)
    return recipe, TuneSettings(**search), run
