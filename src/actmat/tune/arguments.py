"""`actmat.tune`: a search from plain arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from actmat.api.agreement import DataSource
from actmat.api.merging import Location, make_arguments
from actmat.tune.report import TuneReport
from actmat.tune.search import parse_budget
from actmat.tune.space import Space, make_space
from actmat.tune.tuning import TuneProgress, TuneSettings, tune_recipe

__all__ = ["tune"]

_SEARCH = frozenset(f.name for f in dataclasses.fields(TuneSettings)) - {"device", "dtype"}


def tune(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    data: DataSource | Mapping[str, DataSource],
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
        data: expert -> its unlabelled inputs (32 to 256), or one data set for all.
        out: directory to write; the search itself is described in `OUT.tune`.
        space: what is tried: `{"methods": [...], "scales": [...], "groups": "kind", "weights": True}`; default:
            ten methods at six scales.
        budget: evaluations (200) or time ("15m").
        progress: receives callbacks.
        fields: fields of `TuneSettings` (`score`, `least_agreement`, `predict`, `load`, `model_class`, `new_tokens`,
            ...; `model_dtype` is the dtype of the models while they run), of a recipe, and of `RunSettings`.

    Returns:
        The report: the chosen recipe, all trials, the final comparison with intervals.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    search = {k: fields.pop(k) for k in _SEARCH & fields.keys()} | {"dtype": fields.pop("model_dtype", "float32")}
    recipe, run = make_arguments(base, experts, {"out": str(out), **fields})
    settings = TuneSettings(budget=parse_budget(budget), device=run.device, **search)
    given = data if isinstance(data, Mapping) else dict.fromkeys(recipe.labels, data)
    chosen = space if isinstance(space, Space) else make_space(space or {})
    return tune_recipe(recipe, chosen, given, settings, run, progress)
