"""Merges at scale 1, in float32, kept on disk while candidates are tried: each method merges once.

The folder survives an interruption, and so do the merges that are complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.writing.sidecars import copy_sidecars, side_folder
from actmat.errors import MergeError
from actmat.extras.tune.space import MergeChoice
from actmat.planning.model import MergePlan
from actmat.recipe import ExpertRef, Recipe
from actmat.run import plan_recipe, run_recipes
from actmat.settings import RunSettings

__all__ = ["Merges", "number_checkpoint"]


class Merges:
    """Finished merges by choice.

    Args:
        recipe: inputs, scope, rules and all else that every candidate shares; its scale is ignored.
        folder: where the merges are kept.
        settings: of the runs.
        refused: choice -> why it cannot be merged.
        mark: hash of the recipe, and of sizes and times of its local files.
    """

    def __init__(self, recipe: Recipe, folder: Path, settings: RunSettings) -> None:
        self._recipe = recipe
        self._folder = folder
        self._settings = settings
        self.refused: dict[str, str] = {}
        self.mark = _mark_of(recipe)

    @property
    def base(self) -> str:
        """Location of the base."""
        return self._recipe.base

    def peak_bytes(self, choices: Sequence[MergeChoice]) -> int:
        """Peak memory of the choices that can be planned, with one worker.

        Raises:
            MergeError: the first cannot be planned.
        """
        found = [self.plan(choices[0]).peak_bytes(1)]
        for choice in choices[1:]:
            with contextlib.suppress(MergeError):
                found.append(self.plan(choice).peak_bytes(1))
        return max(found)

    def recipe_of(self, choice: MergeChoice, scale: float = 1.0) -> Recipe:
        """The recipe of a choice, without an output."""
        experts = self._recipe.experts
        if choice.weights is not None:
            pairs = zip(experts, choice.weights, strict=True)
            experts = tuple(ExpertRef.model_validate({**e.model_dump(), "weight": w}) for e, w in pairs)
        changes = {"method": choice.method, "options": dict(choice.options), "scale": scale, "experts": experts}
        return self._recipe.model_copy(update=changes)

    def plan(self, choice: MergeChoice, scale: float = 1.0) -> MergePlan:
        """The plan of a choice.

        Raises:
            MergeError: it cannot be merged.
        """
        recipe = self.recipe_of(choice, scale)
        return plan_recipe(recipe)

    def folder_of(self, choice: MergeChoice) -> Path:
        """Folder of the merge of a choice, made or not; another one if the recipe or a local input is another."""
        key = hashlib.sha256(f"{self.mark} {choice.key}".encode()).hexdigest()[:12]
        return self._folder / f"{choice.method}-{key}"

    def make(self, choices: Sequence[MergeChoice]) -> list[MergeChoice]:
        """Merge what is missing, all in one reading of the inputs; returns those that are there.

        A choice that cannot be planned or merged is noted in `refused` and left out.
        """
        possible = []
        for choice in choices:
            try:
                self.plan(choice)
                possible.append(choice)
            except MergeError as error:
                self.refused[choice.key] = error.problems[0] if error.problems else str(error)
        missing = [c for c in possible if not (self.folder_of(c) / "actmat_manifest.json").is_file()]
        if missing:
            self._merge(missing)
        return [c for c in possible if c.key not in self.refused]

    def _merge(self, choices: Sequence[MergeChoice]) -> None:
        recipes = [
            self.recipe_of(c).model_copy(update={"out": str(self.folder_of(c)), "dtype": "float32"}) for c in choices
        ]
        try:
            run_recipes(recipes, self._settings)
        except MergeError as error:
            if len(choices) == 1:
                self.refused[choices[0].key] = error.problems[0] if error.problems else str(error)
                return
            for choice in choices:  # one of them cannot be computed: find out which
                self._merge([choice])

    def remove(self) -> None:
        """Free the disk."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _mark_of(recipe: Recipe) -> str:
    """Hash of all that a merge depends on besides the choice."""
    shared = recipe.model_dump_json(exclude={"method", "options", "scale", "out"})
    places = [Path(recipe.base), *(Path(e.path) for e in recipe.experts)]
    files = sorted(f for p in places if p.exists() for f in ([p] if p.is_file() else p.iterdir()) if f.is_file())
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(f"{shared} {stats}".encode()).hexdigest()[:12]


def number_checkpoint(
    folder: Path, specs: Sequence[TensorSpec], groups: Mapping[str, str], names: Sequence[str], files: Path
) -> Path:
    """A checkpoint with the number of its group in every entry of every tensor, and the base's config files."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {n: float(i) for i, n in enumerate(names)}
    tensors = {s.name: torch.full(s.shape, numbers[groups[s.name]]) for s in specs if s.name in groups}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    copy_sidecars(side_folder(files), side_folder(files), folder, "float32")
    return folder
