"""The public functions, thin over `run`: arguments become a recipe and settings."""

from __future__ import annotations

from actmat.api.diagnosing import diagnose, diagnose_output, recipe_of_output
from actmat.api.merging import Location, make_arguments, merge, plan, split_fields
from actmat.run import MergeReport, diagnose_recipe, plan_recipe, run_recipes

__all__ = [
    "Location",
    "MergeReport",
    "diagnose",
    "diagnose_output",
    "diagnose_recipe",
    "make_arguments",
    "merge",
    "plan",
    "plan_recipe",
    "recipe_of_output",
    "run_recipes",
    "split_fields",
]
