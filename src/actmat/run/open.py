"""The inputs of recipes: what they are decides the kind of output; opened together, all their problems in one error."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.resolve import missing_problem, open_checkpoint
from actmat.checkpoints.untied import UntiedCheckpoint
from actmat.checkpoints.writing.sidecars import SideFolder, check_sidecars
from actmat.engine.content import check_adapters, check_probes
from actmat.engine.inputs import Inputs
from actmat.errors import CheckpointError, Problems, RecipeError
from actmat.experts.base import Expert
from actmat.experts.checkpoint import CheckpointExpert
from actmat.experts.policy import VocabularyPolicy, align_vocabularies
from actmat.experts.resolve import has_factors, in_layout, needs_base, open_base, open_expert
from actmat.experts.untied import FIX, untied_base
from actmat.methods import METHODS, get_method
from actmat.planning.adapter.layouts import needs_one_spelling, output_layout
from actmat.planning.choose import Chooser
from actmat.planning.statistics import declared_kinds, opened_statistics
from actmat.recipe import Recipe
from actmat.recipe.output import Adapter, Extracted, Model
from actmat.recipe.schema import ExpertRef, Postprocess
from actmat.recipe.values import leaves
from actmat.report.words import plural
from actmat.run.automatic import AUTO, check_options, with_method
from actmat.run.places import Place, Writes, find_place
from actmat.settings import RunSettings

BASELESS = tuple(m.name for m in METHODS if m.access.baseless)
PEFT = ("same", "peft")
"""Layouts of adapters that can be extracted."""


@dataclass(frozen=True)
class Opened:
    """Recipes with what they name, opened.

    Args:
        recipes: each with its kind of output, and a base where it can do without one.
        inputs: shared by all.
        place: of the run.
        problems: found so far; planning adds its own.
        began: start of the run on the performance counter.
    """

    recipes: tuple[Recipe, ...]
    inputs: Inputs
    place: Place
    problems: Problems
    began: float


@contextlib.contextmanager
def open_inputs(
    recipes: Sequence[Recipe], settings: RunSettings | None = None, writes: Writes = "nothing", *, here: bool = True
) -> Iterator[Opened]:
    """Base, experts and statistics of recipes that share them, opened; the places of the run are checked before.

    Args:
        recipes: what is wanted.
        settings: of the run.
        writes: see `find_place`.
        here: whether the run takes place on this machine.

    Raises:
        MergeError: all inputs that cannot be opened, with all problems of the places.
    """
    began, problems = time.perf_counter(), Problems()
    adapters: dict[str, bool] = {}
    for recipe in recipes:
        with problems.noted():
            check_options(recipe)
    with problems.noted():
        adapters = {e.path: needs_base(e.path) for r in recipes for e in r.experts}
        recipes = [resolved(with_method(r, adapters), adapters) for r in recipes]
    _check_shared(recipes)
    place = find_place(recipes, settings or RunSettings(), writes, problems, here=here)
    recipe = recipes[0]
    merges_adapters = isinstance(recipe.output, Adapter)
    if not recipe.base and not merges_adapters:
        problems.check()
    with contextlib.ExitStack() as stack:
        opening = _Opening(stack)
        base = opening(lambda: open_base(recipe.base, recipe.model.base_as)) if not merges_adapters else None
        if (vocabulary := recipe.model.vocabulary) is not None and base is not None:
            base, experts = _aligned(recipe, adapters, vocabulary.policy(), base, opening)
        else:
            experts = [opening(_opener(e, adapters, base, merges_adapters)) for e in recipe.experts]
        if merges_adapters:
            experts = _in_one_layout(recipe, experts)
        if opening.problems:
            found = dict.fromkeys(opening.problems)  # of an expert that is opened as the base, too: once
            problems.found.append(CheckpointError(f"{plural(len(found), 'problem')} with the inputs.", found))
            if choices := [p for r in recipes if r.method != AUTO for p in Chooser(r, declared_kinds(r)).problems]:
                problems.found.append(RecipeError("The recipe is not valid.", choices))
            problems.check()
        if base is not None:
            known = len(problems.found)
            with problems.noted():
                base = _untied(recipes, base, [e for e in experts if e is not None])
            if len(problems.found) > known:
                problems.check()
        statistics = stack.enter_context(opened_statistics(recipe))
        inputs = Inputs(recipe.labels, base, [e for e in experts if e is not None], statistics)
        if place.outs or not here:
            with problems.noted():
                _check_copied_files(recipes, inputs)
        yield Opened(tuple(recipes), inputs, place, problems, began)


def resolved(recipe: Recipe, adapters: Mapping[str, bool]) -> Recipe:
    """The recipe with its kind of output, and with a base where its result does not depend on one.

    Without a base, `average`, `linear`, `karcher` and `slerp` between two experts give `W*` of the experts' weights
    only. The engine works with deltas, so the first expert is the point that they are measured from.

    Args:
        recipe: what is wanted; an adapter that experts without factors are merged into is an extraction.
        adapters: location of every expert -> whether it is an adapter.

    Raises:
        RecipeError: an adapter is wanted of experts that are none, or a model without a base.
    """
    output = recipe.output
    full = [e.label for e in recipe.experts if not adapters[e.path]]
    if full and not recipe.base:
        check_paths(recipe)
    if isinstance(output, Adapter):
        extracts = recipe.base and output.layout in PEFT and (output.rank is not None or not full)
        if extracts and not all(has_factors(e.path) for e in recipe.experts):
            return recipe.model_copy(update={"output": Extracted(rank=output.rank, ranks=output.ranks)})
        if full:
            to = "adapter" if output.layout == "same" else output.layout
            raise RecipeError(
                f"--to {to} needs adapters, and {', '.join(full)} is none. Give --base and --rank (or --energy) to "
                "extract one of what is merged, write a model (--base ..., --to model), or make adapters first (actmat "
                "extract --base ... --model ... --rank 64 --out ...)."
            )
        return recipe
    if recipe.base:
        return recipe
    if isinstance(output, Extracted):
        raise RecipeError("--energy extracts an adapter from what is merged into a base: give --base.")
    if not full and output is None:
        return recipe.model_copy(update={"output": Adapter()})
    reasons = base_problems(recipe)
    if not reasons and len(full) == len(recipe.experts):
        first = recipe.experts[0]
        note = (
            f"no base is given, and {recipe.method} needs none: deltas are measured from expert '{first.label}', which "
            "does not change the result; its config and tokenizer files, and what is not merged, go into the output"
        )
        notes = (*recipe.notes, note)
        return recipe.model_copy(update={"base": first.path, "output": output or Model(), "notes": notes})
    if not full:
        given = ", ".join(sorted(f"'{n}'" for n in recipe.model.model_fields_set - {"kind"}))
        raise RecipeError(
            f"A full model{f', as {given} asks for,' * bool(given)} is merged into a base: give --base, or write an "
            "adapter (--to adapter)."
        )
    why = f"Without one: {'; '.join(reasons)}." if reasons else "Adapters are deltas of a base."
    raise RecipeError(
        f"--base must be given: {', '.join(full)} is no adapter, so a full model is written, which is merged into the "
        f"checkpoint that all experts come from. {why}"
    )


def check_paths(recipe: Recipe) -> None:
    """Refuse experts at paths that do not exist: without a base, they would be taken for full checkpoints.

    Raises:
        CheckpointError: lists them all.
    """
    if missing := [problem for e in recipe.experts if (problem := missing_problem(e.path))]:
        raise CheckpointError(f"{len(missing)} problem{'s' * (len(missing) > 1)} with the inputs.", missing)


def base_problems(recipe: Recipe) -> list[str]:
    """Reasons for which the result of a recipe depends on a base; empty where it can be merged without one."""
    problems = []
    named = [(recipe.method, recipe.options, "")]
    named += [(r.method or recipe.method, r.options, f"rules.{i}: ") for i, r in enumerate(recipe.rules) if not r.keep]
    for name, options, where in named:
        if name == AUTO:  # becomes a method that needs none
            continue
        try:
            needs_none = get_method(name).is_baseless(options, len(recipe.experts))
        except RecipeError as error:  # of an unknown name
            problems.append(where + error.sentence)
            continue
        if not needs_none:
            near = {"slerp": "; slerp between two experts", "karcher": "; karcher without include_base"}.get(name, "")
            known = ", ".join(BASELESS)
            problems.append(f"{where}method '{name}' merges deltas from a base ({known} need none{near})")
    factors = [recipe.scale, *(r.scale for r in recipe.rules if r.scale is not None)]
    if any(leaf != 1.0 for factor in factors for leaf in leaves(factor)):
        problems.append("'scale' is a factor of the delta from a base")
    if recipe.keep or any(r.keep for r in recipe.rules):
        problems.append("'keep' copies tensors of a base")
    if recipe.post or recipe.postprocess != Postprocess():
        problems.append("post-processing changes the delta from a base")
    if recipe.model.vocabulary is not None and recipe.model.vocabulary.source == "base":
        problems.append("'vocabulary: base' takes the tokens of a base")
    return problems


def _check_shared(recipes: Sequence[Recipe]) -> None:
    """One reading serves all recipes of a run, so they must agree on what is read, and how.

    Labels decide too: they are what manifests call the inputs. Weights of experts may differ.

    Raises:
        RecipeError: they do not.
    """
    rows = [
        {
            "base": r.base,
            "base_as": r.model.base_as,
            "experts": [(e.path, e.label, e.statistics, e.stacks) for e in r.experts],
            "vocabulary": r.model.vocabulary,
            "compute_dtype": r.compute_dtype,
            "allow_nonfinite": r.allow_nonfinite,
            "output": None if r.output is None else r.output.kind,
            "layout": r.adapter.layout,
            "executor": r.executor,
        }
        for r in recipes
    ]
    for name in rows[0]:
        found = {str(row[name]) for row in rows}
        if len(found) > 1:
            raise RecipeError(
                f"Recipes of one run share {', '.join(rows[0])}, but '{name}' differs: {' and '.join(sorted(found))}. "
                "Run them one after the other."
            )


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
    recipe: Recipe, adapters: Mapping[str, bool], policy: VocabularyPolicy, base: Checkpoint, opening: _Opening
) -> tuple[Checkpoint, list[Expert | None]]:
    """The base and the experts with the rows of one vocabulary; adapters are fitted to that base."""
    full = {e.label: opening(partial(open_base, e.path)) for e in recipe.experts if not adapters.get(e.path, False)}
    found = {label: checkpoint for label, checkpoint in full.items() if checkpoint is not None}
    if len(found) == len(full):
        with opening.noted():
            base, found = align_vocabularies(base, found, policy)
    experts: dict[str, Any] = {label: CheckpointExpert(checkpoint) for label, checkpoint in found.items()}
    return base, [
        experts.get(e.label) if e.label in full else opening(_opener(e, adapters, base, False)) for e in recipe.experts
    ]


def _untied(recipes: Sequence[Recipe], base: Checkpoint, experts: Sequence[Expert]) -> Checkpoint:
    """The base, with an output head of its own where experts train it apart from the table that it is tied to.

    Raises:
        CheckpointError: it cannot be untied, or not in the kind of output that is wanted.
    """
    recipe = recipes[0]
    untied = untied_base(base, experts, recipe.labels, ties=all(r.ties for r in recipes))
    if isinstance(untied, UntiedCheckpoint):
        problem = f"{base.location}: {untied.notes[-1]}, which "
        if isinstance(recipe.output, Extracted):
            raise CheckpointError(f"{problem}an adapter of the tied base cannot hold. {FIX}.")
        if recipe.model.quantise is not None:
            raise CheckpointError(f"{problem}--quantise same cannot write. Fix: leave it out.")
    return untied


def _opener(
    expert: ExpertRef, adapters: Mapping[str, bool], base: Checkpoint | None, merges_adapters: bool
) -> Callable[[], Expert]:
    location = expert.path
    is_full = not adapters.get(location, True)
    if base is None and not merges_adapters and is_full:  # look only for further problems
        return lambda: CheckpointExpert(open_checkpoint(location))
    return lambda: open_expert(location, base, is_full=is_full, stacks=expert.stacks)


def _in_one_layout(recipe: Recipe, experts: Sequence[Expert | None]) -> list[Expert | None]:
    """Adapters of files with the modules, names and factors of the output's layout."""
    found = [e.adapter for e in experts if e is not None and e.adapter is not None]
    if len(found) < len(experts):
        return list(experts)
    layout = output_layout(recipe, found)
    return [
        in_layout(e, layout) if e is not None and (a.layout != layout or needs_one_spelling(found)) else e
        for e, a in zip(experts, found, strict=True)
    ]


def _check_copied_files(recipes: Sequence[Recipe], inputs: Inputs) -> None:
    """Refuse local folders whose config or tokenizer files cannot be copied into an output.

    Raises:
        CheckpointError: a file is a link out of its folder, or no regular file.
    """
    if inputs.base is None or inputs.base.directory is None or isinstance(recipes[0].output, Extracted):
        return
    for wanted in {recipe.model.files_of for recipe in recipes}:
        chosen: Checkpoint | None = inputs.base
        if wanted in inputs.labels:
            expert = inputs.experts[inputs.labels.index(wanted)]
            chosen = expert.checkpoint if isinstance(expert, CheckpointExpert) else None
        folders = [
            None if c is None or c.directory is None else SideFolder(c.directory, c.side_files())
            for c in (inputs.base, chosen)
        ]
        check_sidecars(folders[0], folders[1])


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
