"""Merges at scale 1, in float32, kept on disk while candidates are tried: each choice is planned and merged once.

The folder survives an interruption, and so do the merges that are complete.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

from actmat.errors import MergeError
from actmat.extras.tune.space import MergeChoice
from actmat.planning.model import MergePlan
from actmat.recipe import ExpertRef, Recipe
from actmat.run import plan_recipe, run_recipes
from actmat.settings import RunSettings


def recipe_of(recipe: Recipe, choice: MergeChoice, scale: float = 1.0) -> Recipe:
    """The recipe of a choice."""
    experts = recipe.experts
    if choice.weights is not None:
        pairs = zip(experts, choice.weights, strict=True)
        experts = tuple(ExpertRef.model_validate({**e.model_dump(), "weight": w}) for e, w in pairs)
    changes = {"method": choice.method, "options": dict(choice.options), "scale": scale, "experts": experts}
    return recipe.model_copy(update=changes)


def peak_bytes(recipe: Recipe, choices: Sequence[MergeChoice]) -> int:
    """Peak memory of the choices that can be planned, with one worker.

    Raises:
        MergeError: the first cannot be planned.
    """
    found = [plan_recipe(recipe_of(recipe, choices[0])).peak_bytes(1)]
    for choice in choices[1:]:
        with contextlib.suppress(MergeError):
            found.append(plan_recipe(recipe_of(recipe, choice)).peak_bytes(1))
    return max(found)


class Merges:
    """Finished merges by choice.

    Args:
        recipe: inputs, scope, rules and all else that every candidate shares; its scale is ignored.
        folder: where the merges are kept.
        settings: of the runs.

    Attributes:
        plans: choice -> the plan by which it was merged.
        refused: choice -> the reason why it cannot be merged.
        mark: hash of the recipe, and of sizes and times of its local files.
    """

    def __init__(self, recipe: Recipe, folder: Path, settings: RunSettings) -> None:
        self.recipe = recipe
        self._folder = folder
        self._settings = settings
        self.plans: dict[str, MergePlan] = {}
        self.refused: dict[str, str] = {}
        self.mark = _mark_of(recipe)

    def folder_of(self, choice: MergeChoice) -> Path:
        """Folder of the merge of a choice, made or not; another one if the recipe or a local input is another."""
        key = hashlib.sha256(f"{self.mark} {choice.key}".encode()).hexdigest()[:12]
        return self._folder / f"{choice.method}-{key}"

    def make(self, choices: Sequence[MergeChoice]) -> list[MergeChoice]:
        """Merge what is missing, all in one reading of the inputs; returns those that are there.

        A choice that cannot be planned or merged is noted in `refused` and left out.
        """
        if missing := [c for c in choices if c.key not in self.plans and c.key not in self.refused]:
            self._merge(missing)
        return [c for c in choices if c.key in self.plans]

    def _merge(self, choices: Sequence[MergeChoice]) -> None:
        fields = [{"out": str(self.folder_of(c)), "dtype": "float32"} for c in choices]
        recipes = [recipe_of(self.recipe, c).model_copy(update=f) for c, f in zip(choices, fields, strict=True)]
        try:
            reports = run_recipes(recipes, self._settings)
        except MergeError as error:
            if len(choices) == 1:
                self.refused[choices[0].key] = error.problems[0] if error.problems else str(error)
                return
            possible = [c for c in choices if self._can_be_planned(c)]
            if len(possible) == len(choices):  # one of them cannot be computed: find out which
                for choice in choices:
                    self._merge([choice])
            elif possible:
                self._merge(possible)
            return
        self.plans |= {c.key: report.plan for c, report in zip(choices, reports, strict=True)}

    def _can_be_planned(self, choice: MergeChoice) -> bool:
        try:
            plan_recipe(recipe_of(self.recipe, choice))
        except MergeError as error:
            self.refused[choice.key] = error.problems[0] if error.problems else str(error)
            return False
        return True


def _mark_of(recipe: Recipe) -> str:
    """Hash of all that a merge depends on besides the choice."""
    shared = recipe.model_dump_json(exclude={"method", "options", "scale", "out"})
    places = [Path(recipe.base), *(Path(e.path) for e in recipe.experts)]
    files = sorted(f for p in places if p.exists() for f in ([p] if p.is_file() else p.iterdir()) if f.is_file())
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(f"{shared} {stats}".encode()).hexdigest()[:12]
