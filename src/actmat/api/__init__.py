"""The public functions, thin over `run`: arguments become a recipe and settings."""

from __future__ import annotations

from actmat.api.diagnosing import diagnose, diagnose_output, recipe_of_output
from actmat.api.merging import Location, average, make_arguments, merge, plan
from actmat.recipe.trajectory import average_recipe
from actmat.run import MergeReport, diagnose_recipe, plan_recipe, run_recipes

__all__ = [
    "Location",
    "MergeReport",
    "average",
    "average_recipe",
    "diagnose",
    "diagnose_output",
    "diagnose_recipe",
    "make_arguments",
    "merge",
    "plan",
    "plan_recipe",
    "recipe_of_output",
    "run_recipes",
]
