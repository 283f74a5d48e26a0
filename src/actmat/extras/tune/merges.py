"""Merges at scale 1, in float32: each choice is planned, merged once and kept in a folder.

The folder survives an interruption, and so do the merges in it that are complete.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from actmat.checkpoints.model import Model
from actmat.errors import CheckpointError, MergeError, OutputError, RecipeError, StatisticsError
from actmat.experts.locate import OpenInput, has_factors, locate_in, require_model
from actmat.experts.lora.adapter import Adapter
from actmat.extras.models.loading import named_base
from actmat.extras.tune.space import MergeChoice
from actmat.planning.model import MergePlan
from actmat.progress import Progress
from actmat.recipe import Recipe
from actmat.run import run_recipes
from actmat.run.automatic import check_options, with_method
from actmat.run.locate import Located, locate_inputs
from actmat.settings import RunSettings


def recipe_of(recipe: Recipe, choice: MergeChoice, scale: float = 1.0) -> Recipe:
    """The recipe of a choice."""
    changes = {"method": choice.method, "options": dict(choice.options), "scale": scale}
    return recipe.model_copy(update=changes | ({"space": choice.space} if choice.space else {}))


class Merges:
    """Finished merges by choice.

    Args:
        recipe: inputs, scope, rules, output and all else that every candidate shares; its scale is ignored.
        folder: where merges are kept.
        settings: of the runs.
        progress: receives callbacks.

    Attributes:
        plans: choice -> the plan by which it was merged.
        refused: choice -> the reason why it cannot be merged.
        mark: hash of the recipe, and of sizes and times of its local files.
    """

    def __init__(self, recipe: Recipe, folder: Path, settings: RunSettings, progress: Progress) -> None:
        self.recipe = recipe
        self._folder, self._settings, self._progress = folder, settings, progress
        self.plans: dict[str, MergePlan] = {}
        self.refused: dict[str, str] = {}
        shared = recipe.model_dump_json(exclude={"method", "options", "scale", "out"})
        self.mark = mark_of(shared, files_of([recipe.base, *(e.path for e in recipe.experts)]))

    def folder_of(self, choice: MergeChoice) -> Path:
        """Folder of the merge of a choice, made or not; another one if the recipe or a local input is another."""
        return self._folder / f"{choice.method}-{mark_of(self.mark, choice.key)}"

    def make(self, choices: Sequence[MergeChoice]) -> list[MergeChoice]:
        """Merge what is missing; returns the choices that are there.

        A choice that cannot be planned or merged is noted in `refused` and left out.

        Raises:
            OutputError, CheckpointError, StatisticsError: the disk is full, or an input cannot be read.
        """
        for choice in choices:
            if choice.key in self.plans or choice.key in self.refused:
                continue
            fields = {"out": str(self.folder_of(choice)), "dtype": "float32"}
            recipe = recipe_of(self.recipe, choice).model_copy(update=fields)
            try:
                (report,) = run_recipes([recipe], self._settings, self._progress, doing=f"merging {choice}")
            except (OutputError, CheckpointError, StatisticsError):  # a file that fails speaks against no choice
                raise
            except MergeError as error:
                self.refused[choice.key] = error.problems[0] if error.problems else str(error)
            else:
                self.plans[choice.key] = report.plan
        return [c for c in choices if c.key in self.plans]


@dataclass(frozen=True)
class SearchInputs:
    """Inputs of a search, and decisions that depend on them.

    Args:
        recipe: with its base, and a named method.
        base: open.
        are_adapters: every delta is stored as factors of PEFT's, and the recipe treats no tensor in a way of its own,
            so that candidates are adapters.
    """

    recipe: Recipe
    base: Model
    are_adapters: bool


@contextlib.contextmanager
def search_inputs(recipe: Recipe) -> Iterator[SearchInputs]:
    """The inputs of a search, each looked at once; without a base, the one that the adapters name.

    Raises:
        RecipeError: no base is given, and they name none, or several.
        CheckpointError: an input cannot be opened.
    """
    check_options(recipe)
    with contextlib.ExitStack() as stack:
        located = stack.enter_context(locate_inputs(recipe))
        named = with_method(located)
        base = located.base
        if base is None:
            place, first = _base_of_adapters(recipe, located), recipe.experts[0].path
            with named_base(first, place):
                base = locate_in(stack, place)
            named = named.model_copy(update={"base": place})
        are_adapters = all(map(_has_plain_factors, located.experts)) and _is_plain(recipe)
        yield SearchInputs(named, require_model(base), are_adapters)


def _base_of_adapters(recipe: Recipe, located: Located) -> str:
    names = set()
    for label, expert in zip(recipe.labels, located.experts, strict=True):
        if isinstance(expert, Model):
            raise RecipeError(f"No base given: pass --base; {label} is a full checkpoint.")
        names.add(expert.config.base_model)
    if len(names) != 1 or not (base := names.pop()):
        raise RecipeError("The adapters do not name a common base: pass --base.")
    return base


def _has_plain_factors(expert: OpenInput) -> bool:
    """True for an adapter that holds factors of PEFT's only."""
    return isinstance(expert, Adapter) and has_factors(expert) and expert.layout == "peft" and not expert.extras


def _is_plain(recipe: Recipe) -> bool:
    """True if the recipe treats no tensor in a way of its own."""
    plain = Recipe(experts=recipe.experts)
    fields = ("rules", "roles", "keep", "ties", "scope", "space", "post")
    return all(getattr(recipe, n) == getattr(plain, n) for n in fields) and recipe.model.vocabulary is None


def mark_of(*texts: object) -> str:
    """Hash of some texts."""
    return hashlib.sha256(" ".join(map(str, texts)).encode()).hexdigest()[:12]


def files_of(places: Iterable[str]) -> list[tuple[str, int, int]]:
    """Names, sizes and times of local files."""
    local = [Path(p) for p in places if p and Path(p).exists()]
    files = sorted(f for p in local for f in ([p] if p.is_file() else p.iterdir()) if f.is_file())
    return [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
