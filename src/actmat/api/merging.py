"""Merge checkpoints, or plan a merge."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.errors import RecipeError
from actmat.planning import MergePlan
from actmat.progress import Progress, usual_progress
from actmat.recipe import Recipe, add_statistics, make_recipe
from actmat.recipe.output import with_output
from actmat.run import MergeReport, plan_recipe, run_recipes
from actmat.settings import RunSettings

Location = str | Path

_SETTINGS = frozenset(f.name for f in dataclasses.fields(RunSettings))


def merge(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    out: Location,
    method: str = "auto",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> MergeReport:
    """Merge checkpoints into one: `W* = W_0 + scale * D*`, tensor by tensor.

    Args:
        base: directory, file, hub id `org/name[@revision]` or URL of the checkpoint that all experts come from; None
            merges adapters into an adapter.
        experts: likewise; a mapping may give `path`, `name` and `weight`.
        out: directory to write, or its URL; must not exist, or be empty, unless `overwrite`.
        method: merge method, see `actmat methods`; auto takes the one that measurements prefer.
        weights: one per expert, for methods that take weights.
        statistics: output of `actmat statistics collect`, by the experts' names or one each in their order, for
            methods that need it.
        progress: see `Progress`; None: a line in a notebook, nothing elsewhere. `NoProgress()` is silent anywhere.
        fields: any other field of a recipe (`options`, `scale`, `scope`, `rules`, `keep`, `dtype`, `seed`, ...; see
            `recipe.Recipe`) or of the settings of a run (`device`, `max_memory`, `threads`, `overwrite`, `diagnose`,
            ...; see `settings.RunSettings`).

    Returns:
        The report; the model is in `out`.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    recipe, settings = make_arguments(base, experts, {"out": str(out), "method": method} | fields, weights, statistics)
    return run_recipes([recipe], settings, progress or usual_progress())[0]


def plan(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    method: str = "auto",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    **fields: Any,
) -> MergePlan:
    """Plan what `merge` would do, tensor by tensor, from headers only. Arguments as for `merge`.

    Raises:
        MergeError: the inputs do not fit; carries all problems.
    """
    recipe, settings = make_arguments(base, experts, {"method": method} | fields, weights, statistics)
    return plan_recipe(recipe, device=settings.device, device_memory=settings.device_memory)


def make_arguments(
    base: Location | None,
    experts: Sequence[Location | Mapping[str, Any]],
    fields: Mapping[str, Any],
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
) -> tuple[Recipe, RunSettings]:
    """The recipe and the settings that the arguments of `merge` describe.

    Raises:
        RecipeError: they describe none; carries all problems.
    """
    _check_locations(base, experts)
    listed: list[dict[str, Any]] = [dict(e) if isinstance(e, Mapping) else {"path": str(e)} for e in experts]
    if statistics is not None:
        given = statistics if isinstance(statistics, Mapping) else [str(s) for s in statistics]
        listed = add_statistics(listed, given)
    if weights is not None:
        if len(weights) != len(listed):
            raise RecipeError(f"There are {len(listed)} experts and {len(weights)} weights; give one each.")
        listed = [e | {"weight": w} for e, w in zip(listed, weights, strict=True)]
    settings, rest = split_fields(fields)
    rest["options"] = dict(rest.get("options") or {})
    inputs = {"base": "" if base is None else str(base), "experts": listed}
    return make_recipe(with_output(inputs, rest)), settings


def _check_locations(base: object, experts: Sequence[object]) -> None:
    """Refuse models, tensors and recipes where locations are expected.

    Raises:
        RecipeError: names all of them.
    """
    if isinstance(experts, str | os.PathLike):
        raise RecipeError(f"experts: expected a list, found the one location '{experts}'. Fix: ['{experts}']")
    named = {} if base is None else {"base": base}
    named |= {f"experts[{n}]": e for n, e in enumerate(experts) if not isinstance(e, Mapping)}
    wrong = {n: v for n, v in named.items() if not isinstance(v, str | os.PathLike)}
    if wrong:
        raise RecipeError(
            "Models are merged from where they are stored. Fix: save a model in memory first (save_pretrained); a "
            "Recipe is run by actmat.run.run_recipes([recipe]), and tensors are merged by actmat.merge_matrices.",
            [f"{n}: expected a path, a hub id or a URL, found {type(v).__name__}" for n, v in wrong.items()],
        )


def split_fields(fields: Mapping[str, Any]) -> tuple[RunSettings, dict[str, Any]]:
    """The settings of a run among keyword arguments, and the others."""
    settings = {k: v for k, v in fields.items() if k in _SETTINGS}
    return RunSettings(**settings), {k: v for k, v in fields.items() if k not in _SETTINGS}
