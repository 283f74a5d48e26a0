"""From recipes to finished outputs, and other ways to run a recipe: planned only, measured, in memory, in parts."""

from __future__ import annotations

from actmat.run.recipes import diagnose_recipe, plan_recipe, run_recipes
from actmat.run.resume import MergeReport

__all__ = ["MergeReport", "diagnose_recipe", "plan_recipe", "run_recipes"]
