"""The form of the page: a recipe, its output, factors of groups of layers, and settings of a run.

As JSON: `recipe` (fields of `Recipe`), `out`, `grouping` (see `tune.groups`), `scales` (of these groups, where another
than the recipe's is wanted), `settings` (fields of `RunSettings`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, get_args

from actmat.errors import RecipeError
from actmat.extras.tune.groups import FIXED, Grouping, group_rules, groups_of
from actmat.planning.choose import depth_of
from actmat.recipe import Recipe, make_recipe
from actmat.recipe.load import recipe_yaml
from actmat.recipe.output import with_output
from actmat.run import plan_recipe
from actmat.settings import RunSettings

SETTINGS = ("device", "max_memory", "threads", "overwrite", "diagnose")
"""Settings that the page offers."""

SIMPLE = {"base", "experts", "method", "options", "scale", "scope", "dtype", "output"}
"""Fields of a recipe that a command line can say."""

RECIPE_FILE = "recipe.yaml"


def recipe_of(form: Mapping[str, Any]) -> Recipe:
    """The recipe of a form, with a rule for each group of layers that has a scale of its own.

    Raises:
        MergeError: the fields make no recipe; with scales of groups, also what planning it raises.
    """
    recipe = make_recipe(with_output({"out": form.get("out") or None}, form.get("recipe", {})))
    scales = {str(group): value for group, value in form.get("scales", {}).items() if value is not None}
    if not scales:
        return recipe
    groups = _groups(recipe, form)
    known = sorted(set(groups.values()) - {FIXED})
    if unknown := [g for g in scales if g not in known]:
        raise RecipeError(f"There is no group of layers '{unknown[0]}'; groups: {', '.join(known)}.")
    fields = recipe.model_dump(mode="json", exclude_defaults=True)
    fields["rules"] = [*fields.get("rules", []), *group_rules(groups, scales)]
    return make_recipe(fields)


def groups_in(form: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups of layers of a form's grouping that a scale reaches, first layers first: name and number of tensors."""
    recipe = make_recipe(with_output({}, form.get("recipe", {})))
    groups = _groups(recipe, form)
    names = sorted((depth_of(tensor) or 0, group) for tensor, group in groups.items() if group != FIXED)
    counts: dict[str, int] = {}
    for _, group in names:
        counts[group] = counts.get(group, 0) + 1
    return [{"name": group, "tensors": count} for group, count in counts.items()]


def _groups(recipe: Recipe, form: Mapping[str, Any]) -> dict[str, str]:
    grouping = form.get("grouping", "none")
    if grouping not in get_args(Grouping):
        raise RecipeError(f"Layers are grouped by {', '.join(get_args(Grouping))}; found {str(grouping)[:80]!r}.")
    if not isinstance(recipe.scale, int | float):
        raise RecipeError("Groups of layers get scales where the recipe's scale is one number; it varies here.")
    return groups_of(plan_recipe(recipe), grouping)


def settings_of(form: Mapping[str, Any]) -> RunSettings:
    """The settings of a form.

    Raises:
        RecipeError: a setting that the page does not offer.
    """
    given = {name: value for name, value in form.get("settings", {}).items() if value not in (None, "")}
    if unknown := [name for name in given if name not in SETTINGS]:
        raise RecipeError(f"There is no setting '{unknown[0]}' here; settings: {', '.join(SETTINGS)}.")
    return RunSettings(**given)


def command_of(recipe: Recipe, settings: RunSettings) -> tuple[str, str]:
    """The command line that does the same, and the recipe file that it reads, empty where flags say everything.

    >>> recipe = make_recipe({"base": "base", "experts": ["math", "my code"], "method": "ties", "out": "merged"})
    >>> command_of(recipe, RunSettings(threads=2))[0]
    "actmat merge -b base -e math -e 'my code' -m ties --out merged --threads 2"
    """
    fields = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"out"})
    is_simple = fields.keys() <= SIMPLE and isinstance(recipe.scale, int | float) and _are_simple(fields)
    words = ["actmat", "merge", *(_flags(recipe, fields) if is_simple else [RECIPE_FILE])]
    if recipe.out is not None:
        words += ["--out", recipe.out]
    for name in SETTINGS:
        value, flag = getattr(settings, name), f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value != getattr(RunSettings(), name):
            words += [flag, str(value)]
    return shlex.join(words), "" if is_simple else recipe_yaml(recipe)


def tune_command(recipe: Recipe) -> str:
    """The command of a search for method and scale among these experts; its files of inputs are for the user to name.

    >>> tune_command(make_recipe({"base": "base", "experts": ["math", "code"]}))
    'actmat tune -b base -e math -e code --data math=math.jsonl --data code=code.jsonl --out tuned'
    """
    data = [word for name in recipe.labels for word in ("--data", f"{name}={name}.jsonl")]
    return shlex.join(["actmat", "tune", *_inputs(recipe), *data, "--out", recipe.out or "tuned"])


def _are_simple(fields: Mapping[str, Any]) -> bool:
    """True if the experts and the options have nothing that flags cannot say."""
    experts = all(e.keys() <= {"path", "name", "weight"} for e in fields["experts"])
    numbers = all(isinstance(e.get("weight", 1.0), int | float) for e in fields["experts"])
    output = fields.get("output", {}).keys() <= {"kind", "layout", "rank", "energy"}
    return (
        experts
        and numbers
        and output
        and all(isinstance(v, str | int | float) for v in fields.get("options", {}).values())
    )


def _inputs(recipe: Recipe, *, weights: bool = False) -> list[str]:
    words = ["-b", recipe.base] if recipe.base else []
    for expert in recipe.experts:
        words += ["-e", f"{expert.name}={expert.path}" if expert.name else expert.path]
        words += ["-w", str(expert.weight)] if weights else []
    return words


def _flags(recipe: Recipe, fields: Mapping[str, Any]) -> list[str]:
    words = _inputs(recipe, weights=any(e.weight != 1.0 for e in recipe.experts))
    words += ["-m", recipe.method] if "method" in fields else []
    for name, value in recipe.options.items():
        words += ["-o", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    output = fields.get("output", {})
    to = output.get("layout") or ("adapter" if output.get("kind") == "extracted" else output.get("kind"))
    said = {**fields, **output, "to": to}
    for name in ("scale", "scope", "dtype", "to", "rank", "energy"):
        words += [f"--{name}", str(said[name])] if said.get(name) is not None else []
    return words
