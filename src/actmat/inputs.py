"""The inputs of recipes: opened together, checked, and planned; all their problems in one error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.resolve import open_checkpoint
from actmat.checkpoints.writing.sidecars import SideFolder, check_sidecars
from actmat.engine.content import check_adapters, check_probes
from actmat.engine.inputs import Inputs
from actmat.errors import CheckpointError, MergeError, RecipeError
from actmat.experts.base import Expert
from actmat.experts.checkpoint import CheckpointExpert
from actmat.experts.policy import VocabularyPolicy, align_vocabularies
from actmat.experts.resolve import has_factors, is_adapter, open_base, open_expert
from actmat.planning import MergePlan, build_plan
from actmat.planning.choose import Chooser
from actmat.planning.placement import HOST, DeviceRoom
from actmat.planning.statistics import declared_kinds, opened_statistics
from actmat.recipe import Recipe
from actmat.reference import base_problems

__all__ = ["Problems", "check_copied_files", "check_values", "is_extraction", "opened_inputs", "plans_of",
           "writes_adapter"]  # fmt: skip


@dataclass
class Problems:
    """Errors found so far; raised together, because one problem per run is a day lost on a large checkpoint."""

    found: list[MergeError] = field(default_factory=list)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Go on after an error, to find the next."""
        try:
            yield
        except MergeError as error:
            self.found.append(error)

    def check(self) -> None:
        """Raise all errors as one, of the first one's kind."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            problems = list(dict.fromkeys(p for e in self.found for p in e.problems))
            headline = f"The merge cannot be done: {len(problems)} problem{'s' * (len(problems) > 1)}."
            raise type(self.found[0])(headline, problems)


@contextlib.contextmanager
def opened_inputs(recipes: Sequence[Recipe], problems: Problems | None = None) -> Iterator[Inputs]:
    """Base, experts and statistics of recipes that share them, opened.

    Args:
        recipes: what is wanted.
        problems: found before.

    Raises:
        MergeError: all inputs that cannot be opened, together with the problems found before.
    """
    recipe, problems = recipes[0], problems or Problems()
    to_adapter = False
    with problems.noted():
        to_adapter = writes_adapter(recipe)
    if not recipe.base and not to_adapter:
        problems.check()
    with contextlib.ExitStack() as stack:
        opened = _Opening(stack)
        base = opened(lambda: open_base(recipe.base)) if not to_adapter else None
        if recipe.vocabulary is not None and base is not None:
            base, experts = _aligned(recipe, recipe.vocabulary.policy(), base, opened)
        else:
            experts = [opened(_opener(e.path, base, to_adapter)) for e in recipe.experts]
        if opened.problems:
            many = "s" * (len(opened.problems) > 1)
            problems.found.append(CheckpointError(f"{len(opened.problems)} problem{many} with the inputs.",
                                                  opened.problems))  # fmt: skip
            choices = [p for r in recipes for p in Chooser(r, declared_kinds(r)).problems]
            if choices:
                problems.found.append(RecipeError("The recipe is not valid.", choices))
            problems.check()
        statistics = stack.enter_context(opened_statistics(recipe))
        yield Inputs(recipe.labels, base, [e for e in experts if e is not None], statistics)


T = TypeVar("T", bound=Checkpoint | Expert)


class _Opening:
    """Opens inputs and collects what is wrong with them."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.problems: list[str] = []

    def __call__(self, open_input: Callable[[], T]) -> T | None:
        found: list[T] = []
        with self.noted():
            found.append(open_input())
            self._stack.callback(found[0].close)
        return found[0] if found else None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error, and go on."""
        try:
            yield
        except CheckpointError as error:
            self.problems += error.problems if len(error.problems) > 1 else [error.sentence]


def _aligned(
    recipe: Recipe, policy: VocabularyPolicy, base: Checkpoint, opened: _Opening
) -> tuple[Checkpoint, list[Expert | None]]:
    """The base and the experts with the rows of one vocabulary; adapters are fitted to that base."""
    full = {e.label: opened(_checkpoint(e.path)) for e in recipe.experts if not is_adapter(e.path)}
    found = {label: checkpoint for label, checkpoint in full.items() if checkpoint is not None}
    if len(found) == len(full):
        with opened.noted():
            base, found = align_vocabularies(base, found, policy)
    experts = {label: CheckpointExpert(checkpoint) for label, checkpoint in found.items()}
    return base, [
        experts.get(e.label) if e.label in full else opened(_opener(e.path, base, False)) for e in recipe.experts
    ]


def _checkpoint(location: str) -> Callable[[], Checkpoint]:
    return lambda: open_base(location)


def _opener(location: str, base: Checkpoint | None, to_adapter: bool) -> Callable[[], Expert]:
    if base is None and not to_adapter and not is_adapter(location):  # look only for further problems
        return lambda: CheckpointExpert(open_checkpoint(location))
    return lambda: open_expert(location, base)


def is_extraction(recipe: Recipe) -> bool:
    """True if the recipe wants an adapter and names a base, and an expert has no factors to merge it from.

    Of full models, with a rank or an energy; where all experts are adapters, the ranks may be their own.

    >>> from actmat.recipe import make_recipe
    >>> is_extraction(make_recipe({"base": "base", "experts": ["math"]}))
    False
    """
    if recipe.to not in ("adapter", "peft") or not recipe.base:
        return False
    if recipe.rank is None and recipe.energy is None and not all(is_adapter(e.path) for e in recipe.experts):
        return False
    return recipe.energy is not None or not all(has_factors(e.path) for e in recipe.experts)


def writes_adapter(recipe: Recipe) -> bool:
    """True if the recipe's output is merged from adapters: asked for, or every expert is one and there is no base.

    Raises:
        RecipeError: an adapter is wanted of experts that are none, a model without a base, or neither is possible.
    """
    if recipe.energy is not None and (recipe.rank is not None or recipe.to not in ("adapter", "peft")):
        raise RecipeError(
            "Say how much of each delta is kept by one of both: a rank (--rank 64) or a share of its squared norm "
            "(--energy 0.99)."
            if recipe.rank is not None
            else "--energy is for an adapter: give --to adapter, or leave it out."
        )
    if recipe.energy is not None and not recipe.base:
        raise RecipeError("--energy extracts an adapter from what is merged into a base: give --base.")
    if is_extraction(recipe):
        if recipe.quantise is not None:
            raise RecipeError("--quantise same writes a full model like its base: leave it out for an adapter.")
        return False
    if recipe.to == "model" or (recipe.to is None and recipe.base):
        if not recipe.base:
            raise RecipeError("A full model is merged into a base: give --base, or write an adapter (--to adapter).")
        if recipe.rank is not None:
            raise RecipeError("'rank' is the rank of a merged adapter; write one with --to adapter, or leave it out.")
        return False
    if recipe.quantise is not None:
        raise RecipeError("--quantise same writes a full model like its base: leave it out for an adapter.")
    full = [e.label for e in recipe.experts if not is_adapter(e.path)]
    if full:
        raise RecipeError(
            f"--base must be given: {', '.join(full)} is no adapter, so a full model is written, which is merged into "
            f"the checkpoint that all experts come from. {_why_base(recipe)}"
            if recipe.to is None
            else f"--to {recipe.to} needs adapters, and {', '.join(full)} is none. Give --base and --rank (or "
            "--energy) to extract one of what is merged, write a model (--base ..., --to model), or make adapters "
            "first (actmat extract --base ... --model ... --rank 64 --out ...)."
        )
    return True


def _why_base(recipe: Recipe) -> str:
    reasons = base_problems(recipe)
    return f"Without one: {'; '.join(reasons)}." if reasons else "Adapters are deltas of a base."


def plans_of(
    recipes: Sequence[Recipe], inputs: Inputs, room: DeviceRoom = HOST, problems: Problems | None = None
) -> list[MergePlan]:
    """Plans of recipes over the same inputs.

    Raises:
        MergeError: all their problems, together with those found before.
    """
    problems = problems or Problems()
    plans = []
    for recipe in (r.model_copy(update={"executor": None}) for r in recipes):  # no part of what is merged
        config = None
        with problems.noted():
            if inputs.base is None and recipe.base:
                with open_checkpoint(recipe.base) as base:
                    config = base.config
            plans.append(
                build_plan(recipe, inputs.base, inputs.experts, room=room, statistics=inputs.statistics,
                           base_config=config)
            )  # fmt: skip
    problems.check()
    return plans


def check_copied_files(recipes: Sequence[Recipe], inputs: Inputs) -> None:
    """Refuse local folders whose config or tokenizer files cannot be copied into an output.

    Raises:
        CheckpointError: a file is a link out of its folder, or no regular file.
    """
    if inputs.base is None or inputs.base.directory is None or is_extraction(recipes[0]):
        return
    for wanted in {recipe.files_of for recipe in recipes}:
        chosen: Checkpoint | None = inputs.base
        if wanted in inputs.labels:
            expert = inputs.experts[inputs.labels.index(wanted)]
            chosen = expert.checkpoint if isinstance(expert, CheckpointExpert) else None
        check_sidecars(*(None if c is None or c.directory is None else SideFolder(c.directory, c.side_files())
                         for c in (inputs.base, chosen)))  # fmt: skip


def check_values(inputs: Inputs) -> None:
    """Refuse adapters with NaN or Inf, and statistics of other models, before the work begins.

    Raises:
        CheckpointError, StatisticsError: each lists all.
    """
    problems = [p for label, e in zip(inputs.labels, inputs.experts, strict=True) for p in e.check_values(label)]
    if problems:
        raise CheckpointError(f"The adapters hold values that cannot be merged: {len(problems)} problem(s).", problems)
    check_adapters(inputs)
    check_probes(inputs)
