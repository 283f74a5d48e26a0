"""Merges at scale 1, in float32: each choice is planned and merged once.

Adapters are merged into adapters in memory where the method merges factors. All other merges are written into a folder,
which survives an interruption, and so do the merges in it that are complete.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actmat.checkpoints.base import Checkpoint
from actmat.errors import CheckpointError, MergeError, OutputError, RecipeError
from actmat.experts.locate import Located, LocatedAdapter, locate
from actmat.extras.models.in_memory import MemoryMerge, run_in_memory
from actmat.extras.models.loading import named_base
from actmat.extras.tune.space import MergeChoice
from actmat.methods import get_method
from actmat.planning.model import MergePlan
from actmat.recipe import ExpertRef, Recipe
from actmat.recipe.output import AdapterOutput
from actmat.run import plan_recipe, run_recipes
from actmat.run.automatic import check_options, with_method
from actmat.run.locate import Given, located
from actmat.settings import RunSettings


def recipe_of(recipe: Recipe, choice: MergeChoice, scale: float = 1.0) -> Recipe:
    """The recipe of a choice."""
    experts = recipe.experts
    if choice.weights is not None:
        pairs = zip(experts, choice.weights, strict=True)
        experts = tuple(ExpertRef.model_validate({**e.model_dump(), "weight": w}) for e, w in pairs)
    changes = {"method": choice.method, "options": dict(choice.options), "scale": scale, "experts": experts}
    return recipe.model_copy(update=changes | ({"space": choice.space} if choice.space else {}))


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
        folder: where merges of whole models are kept.
        settings: of the runs.
        factor_bytes: of one merge that is an adapter, see `SearchInputs`; 0: all merges are written as whole models.

    Attributes:
        plans: choice -> the plan by which it was merged.
        refused: choice -> the reason why it cannot be merged.
        mark: hash of the recipe, and of sizes and times of its local files.
    """

    def __init__(self, recipe: Recipe, folder: Path, settings: RunSettings, *, factor_bytes: int = 0) -> None:
        self.recipe, self.factor_bytes = recipe, factor_bytes
        self._folder = folder
        self._settings = settings
        self.plans: dict[str, MergePlan] = {}
        self.refused: dict[str, str] = {}
        self._held: dict[str, MemoryMerge] = {}
        self.mark = _mark_of(recipe)

    def folder_of(self, choice: MergeChoice) -> Path:
        """Folder of the merge of a choice, made or not; another one if the recipe or a local input is another."""
        key = hashlib.sha256(f"{self.mark} {choice.key}".encode()).hexdigest()[:12]
        return self._folder / f"{choice.method}-{key}"

    def is_factored(self, choice: MergeChoice) -> bool:
        """True if the merge of a choice is an adapter."""
        if not self.factor_bytes:
            return False
        with contextlib.suppress(MergeError):
            method = get_method(choice.method)
            options = method.resolve_options(choice.options)
            return bool(choice.space) or method.why_dense(options, len(self.recipe.experts), choice.weights) is None
        return False  # planning says what is wrong

    def whole_plan(self, choice: MergeChoice) -> MergePlan:
        """The plan of a choice that was made as a merge of whole tensors: its own, or of an adapter a second one."""
        return plan_recipe(recipe_of(self.recipe, choice)) if self.is_factored(choice) else self.plans[choice.key]

    def make(self, choices: Sequence[MergeChoice]) -> list[MergeChoice]:
        """Merge what is missing, whole models in one reading of the inputs; returns the choices that are there.

        A choice that cannot be planned or merged is noted in `refused` and left out.

        Raises:
            OutputError, CheckpointError: the disk is full, or an input cannot be read.
        """
        whole = []
        for choice in (c for c in choices if c.key not in self.plans and c.key not in self.refused):
            if self.is_factored(choice):
                self._hold(choice)
            else:
                whole.append(choice)
        if whole:
            self._write(whole)
        return [c for c in choices if c.key in self.plans]

    def take(self, choice: MergeChoice) -> MemoryMerge:
        """The merged adapter of a choice that was made; it is merged again if it was taken before."""
        if choice.key not in self._held:
            self._hold(choice)
        return self._held.pop(choice.key)

    def _hold(self, choice: MergeChoice) -> None:
        """Merge factors in memory."""
        into = {"base": "", "output": AdapterOutput(), "dtype": "float32"}
        here = replace(self._settings, executor="threads")  # factors are small
        try:
            merged = run_in_memory(recipe_of(self.recipe, choice).model_copy(update=into), here)
        except (OutputError, CheckpointError):
            raise
        except MergeError as error:
            self._refuse(choice, error)
            return
        self._held[choice.key], self.plans[choice.key] = merged, merged.plan

    def _write(self, choices: Sequence[MergeChoice]) -> None:
        """Merge whole models into the folder."""
        try:
            reports = run_recipes([self._recipe(c) for c in choices], self._settings)
        except (OutputError, CheckpointError):  # a disk or a file that fails is no reason against a choice
            raise
        except MergeError as error:
            if len(choices) == 1:
                self._refuse(choices[0], error)
            else:  # find out which
                for choice in choices:
                    self._write([choice])
            return
        self.plans |= {c.key: report.plan for c, report in zip(choices, reports, strict=True)}

    def _refuse(self, choice: MergeChoice, error: MergeError) -> None:
        self.refused[choice.key] = error.problems[0] if error.problems else str(error)

    def _recipe(self, choice: MergeChoice) -> Recipe:
        fields = {"out": str(self.folder_of(choice)), "dtype": "float32"}
        return recipe_of(self.recipe, choice).model_copy(update=fields)


@dataclass(frozen=True)
class SearchInputs:
    """Inputs of a search, and decisions that depend on them.

    Args:
        recipe: with its base, and a named method.
        base: open.
        factor_bytes: of the factors of one merge, at most, where every delta is stored as factors of PEFT's and the
            recipe treats no tensor in a way of its own; else 0.
    """

    recipe: Recipe
    base: Checkpoint
    factor_bytes: int


@contextlib.contextmanager
def search_inputs(recipe: Recipe) -> Iterator[SearchInputs]:
    """The inputs of a search, each looked at once; without a base, the one that the adapters name.

    Raises:
        RecipeError: no base is given, and they name none, or several.
        CheckpointError: an input cannot be opened.
    """
    check_options(recipe)
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(located(recipe))
        found = with_method(recipe, given)
        base = given.base
        if base is None:
            place, first = _base_of_adapters(recipe, given), recipe.experts[0].path
            with named_base(first, place):
                base = stack.enter_context(locate(place))
            found = found.model_copy(update={"base": place})
        factors = [_plain_bytes(e) for e in given.experts]
        yield SearchInputs(found, base.model(), sum(factors) if all(factors) and _is_plain(recipe) else 0)


def _base_of_adapters(recipe: Recipe, given: Given) -> str:
    names = set()
    for label, expert in zip(recipe.labels, given.experts, strict=True):
        if not isinstance(expert, LocatedAdapter):
            raise RecipeError(f"No base given: pass --base; {label} is a full checkpoint.")
        names.add(expert.adapter.config.base_model)
    if len(names) != 1 or not (base := names.pop()):
        raise RecipeError("The adapters do not name a common base: pass --base.")
    return base


def _plain_bytes(expert: Located) -> int:
    """Bytes in float32 of an adapter that holds factors of PEFT's only; 0 for any other expert."""
    if not isinstance(expert, LocatedAdapter) or not expert.has_factors or expert.adapter.extras:
        return 0
    return sum(4 * s.numel for s in expert.stored.specs.values()) if expert.adapter.layout == "peft" else 0


def _is_plain(recipe: Recipe) -> bool:
    """True if the recipe treats no tensor in a way of its own."""
    plain = Recipe(experts=recipe.experts)
    own = ("rules", "roles", "keep", "ties", "scope", "space", "post", "postprocess")
    return all(getattr(recipe, n) == getattr(plain, n) for n in own) and recipe.model.vocabulary is None


def _mark_of(recipe: Recipe) -> str:
    """Hash of all that a merge depends on besides the choice."""
    shared = recipe.model_dump_json(exclude={"method", "options", "scale", "out"})
    places = [Path(recipe.base), *(Path(e.path) for e in recipe.experts)]
    files = sorted(f for p in places if p.exists() for f in ([p] if p.is_file() else p.iterdir()) if f.is_file())
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(f"{shared} {stats}".encode()).hexdigest()[:12]
