"""The recipe and the settings that Python arguments describe."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.errors import RecipeError
from actmat.recipe.output import with_output
from actmat.recipe.schema import Recipe, add_statistics, make_recipe
from actmat.settings import RunSettings

Location = str | Path

_SETTINGS = frozenset(f.name for f in dataclasses.fields(RunSettings))


def make_arguments(
    base: Location | None,
    experts: Sequence[Location | Mapping[str, Any]],
    fields: Mapping[str, Any],
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
) -> tuple[Recipe, RunSettings]:
    """The recipe and the settings that the arguments of `merge` describe.

    Raises:
        RecipeError: they are invalid; carries all problems.
    """
    _check_locations(base, experts)
    listed: list[dict[str, Any]] = [dict(e) if isinstance(e, Mapping) else {"path": str(e)} for e in experts]
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


def _check_locations(base: object, experts: Sequence[object]) -> None:
    """Refuse objects where locations are expected.

    Raises:
        RecipeError: names all of them.
    """
    if isinstance(experts, str | os.PathLike):
        raise RecipeError(f"experts: expected a list, found the one location '{experts}'. Fix: ['{experts}']")
    locations = [
        ("base", "" if base is None else base),
        *((f"experts[{n}]", e) for n, e in enumerate(experts) if not isinstance(e, Mapping)),
    ]
    wrong = {n: v for n, v in locations if not isinstance(v, str | os.PathLike)}
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
