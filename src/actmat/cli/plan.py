"""`actmat plan`: show the action for every tensor of a merge, and its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from actmat.cli import flags
from actmat.cli.data import InputFlags
from actmat.cli.flags import FlagFields, RecipeFlags
from actmat.cli.listing import command
from actmat.cli.screen import console, escape, print_json, print_result
from actmat.cli.streams import say
from actmat.settings import RunSettings

if TYPE_CHECKING:
    from actmat.recipe import Recipe


@dataclass(frozen=True)
class PlanOutput(flags.OutputFlags):
    """Flags for the form of a plan."""

    full: Annotated[bool, typer.Option("--full", "--all", help="One line per tensor instead of groups.")] = False


@command("merge", "the merge is possible")
def plan(
    *,
    recipe: flags.RecipeArgument = None,
    fields: RecipeFlags,
    run: Annotated[RunSettings, FlagFields(only=("device", "device_memory"))],
    as_recipe: Annotated[bool, typer.Option("--as-recipe", help="Print the recipe as YAML, also of mergekit.")] = False,
    asked: Annotated[InputFlags, FlagFields(without=("keep_statistics", "tune_scale"))],
    shown: PlanOutput,
) -> None:
    """Show what 'actmat merge' would do with the same flags, from headers.

    actmat plan -b BASE -e EXPERT1 -e EXPERT2
    actmat plan mergekit.yml --as-recipe > recipe.yaml

    Prints the action and the reason for groups of tensors, the bytes to read
    and write, the peak memory and a rough time. If the inputs are
    incompatible, all problems are listed and the exit code is 1. --as-recipe
    opens no model; mergekit fields without a counterpart are listed as an
    error.
    """
    recipes = fields.recipes(recipe)
    if as_recipe:
        _print_recipe(recipes, json=shown.json, quiet=shown.quiet)
    else:
        show_plans(recipes, run, asked, shown)


def show_plans(recipes: Sequence[Recipe], run: RunSettings, asked: InputFlags | None, shown: flags.OutputFlags) -> None:
    """Plan the recipes and print the plans; of a merge by inputs what is measured, on which its plan depends."""
    if asked is not None and asked.data:
        from actmat.cli.searching import plan_by

        plan_by(asked, recipes[0], run, json=shown.json, quiet=shown.quiet)
        return
    from actmat.cli.summary import compact_plan, print_plan
    from actmat.run import plan_recipe

    plans = [plan_recipe(r, device=run.device, device_memory=run.device_memory) for r in recipes]
    if shown.json and shown.full:
        data = [plan.to_json() for plan in plans]
        print_json(data[0] if len(data) == 1 else data)
    elif shown.json:
        print_result("plan", {"plans": [compact_plan(plan) for plan in plans]})
    for plan in () if shown.json or shown.quiet else plans:
        if len(plans) > 1 and plan.recipe.out:
            console.print(f"[bold]{escape(plan.recipe.out)}[/bold]", soft_wrap=True)
        print_plan(plan, full=shown.full)


def _print_recipe(recipes: Sequence[Recipe], *, json: bool, quiet: bool) -> None:
    """Print a recipe on stdout, and its notes on stderr unless `quiet` is set."""
    if len(recipes) > 1:
        raise typer.BadParameter("--as-recipe takes one method and one value per option")
    from actmat.recipe import recipe_yaml

    (recipe,) = recipes
    if json:
        fields = recipe.model_dump(mode="json", exclude_defaults=True)
        print_result("recipe", {"recipe": fields, "notes": list(recipe.notes), "warnings": list(recipe.warnings)})
    else:
        typer.echo(recipe_yaml(recipe), nl=False)
    remarks = (*(f"warning: {text}" for text in recipe.warnings), *(f"note: {text}" for text in recipe.notes))
    for remark in remarks if not quiet else ():
        say(remark)
