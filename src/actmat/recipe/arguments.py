"""The recipe and the settings that Python arguments describe."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from actmat.errors import RecipeError
from actmat.recipe.output import with_output
from actmat.recipe.schema import Recipe, add_statistics, make_recipe
from actmat.settings import RunSettings

Location = str | Path
Experts = Sequence[Location | Mapping[str, Any]] | Mapping[str, Any]
"""Experts in order, or by name; one is a location, or a mapping with a location as `path`, `name` and `weight`."""

_SETTINGS = frozenset(f.name for f in dataclasses.fields(RunSettings))


def make_arguments(
    base: Location | None,
    experts: Experts,
    fields: Mapping[str, Any],
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
) -> tuple[Recipe, RunSettings]:
    """The recipe and the settings that the arguments of `merge` describe.

    Raises:
        RecipeError: they are invalid; carries all problems.
    """
    listed = list_experts(experts)
    _check_locations(base, listed)
    listed = [{**expert, "path": str(expert["path"])} for expert in listed]
    if statistics is not None:
        places = statistics if isinstance(statistics, Mapping) else [str(s) for s in statistics]
        listed = add_statistics(listed, places)
    if weights is not None:
        if len(weights) != len(listed):
            raise RecipeError(f"{len(listed)} experts, but {len(weights)} weights: give one each.")
        listed = [e | {"weight": w} for e, w in zip(listed, weights, strict=True)]
    settings, rest = split_fields(fields)
    rest["options"] = dict(rest.get("options") or {})
    given_inputs: dict[str, Any] = {"base": "" if base is None else str(base), "experts": listed}
    return make_recipe(with_output(given_inputs, rest)), settings


def list_experts(experts: Any) -> list[dict[str, Any]]:
    """Experts in order as fields of the recipe, whose `path` may be a model in memory.

    >>> list_experts({"math": "org/math", "code": {"path": "org/code", "weight": 2.0}})
    [{'path': 'org/math', 'name': 'math'}, {'path': 'org/code', 'weight': 2.0, 'name': 'code'}]

    Raises:
        RecipeError: it is one location, or one state dict.
    """
    if isinstance(experts, str | os.PathLike):
        raise RecipeError(f"experts: expected a list, found the one location '{experts}'. Fix: ['{experts}']")
    if not isinstance(experts, Mapping):
        return [_fields(expert) for expert in experts]
    if any(isinstance(expert, Tensor) for expert in experts.values()):
        raise RecipeError("experts: expected a list, or name -> model, found one state dict. Fix: [STATE_DICT]")
    return [{**_fields(expert), "name": name} for name, expert in experts.items()]


def _fields(expert: Any) -> dict[str, Any]:
    """Fields of one expert; a mapping without a path is a state dict."""
    return dict(expert) if isinstance(expert, Mapping) and "path" in expert else {"path": expert}


def _check_locations(base: object, experts: Sequence[Mapping[str, Any]]) -> None:
    """Refuse objects where locations are expected.

    Raises:
        RecipeError: names all of them.
    """
    places = {"base": "" if base is None else base} | {f"experts[{n}]": e["path"] for n, e in enumerate(experts)}
    wrong = {n: v for n, v in places.items() if not isinstance(v, str | os.PathLike)}
    if wrong:
        raise RecipeError(
            "merge, plan and diagnose take modules and state dicts too, other functions read files (save_pretrained). "
            "Single tensors: actmat.merge_matrices. A Recipe: actmat.run.run_recipes([recipe]).",
            [f"{n}: expected a path, a hub id or a URL, found {type(v).__name__}" for n, v in wrong.items()],
        )


def split_fields(fields: Mapping[str, Any]) -> tuple[RunSettings, dict[str, Any]]:
    """The settings of a run among keyword arguments, and the others."""
    settings = {k: v for k, v in fields.items() if k in _SETTINGS}
    return RunSettings(**settings), {k: v for k, v in fields.items() if k not in _SETTINGS}
