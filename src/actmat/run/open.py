"""Open the inputs of recipes together, with all problems in one error; they decide the kind of output."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.source import LocalSource
from actmat.checkpoints.untied import UntiedCheckpoint, with_marks
from actmat.checkpoints.writing.sidecars import SideFolder, check_sidecars
from actmat.engine.content import check_adapters, check_probes
from actmat.engine.inputs import Inputs
from actmat.errors import CheckpointError, Problems, RecipeError
from actmat.experts.base import Expert
from actmat.experts.checkpoint import CheckpointExpert
from actmat.experts.locate import Located, in_layout
from actmat.experts.policy import vocabulary_aligner
from actmat.experts.untied import FIX, untied_base
from actmat.layout.ties import is_output_head, is_token_table
from actmat.planning.choose import Chooser
from actmat.planning.implied import needs_one_spelling, output_layout
from actmat.planning.statistics import declared_kinds, opened_statistics
from actmat.recipe import Recipe
from actmat.recipe.output import AdapterOutput, ExtractedOutput
from actmat.run.automatic import AUTO, check_options
from actmat.run.decide import check_shared, decide
from actmat.run.locate import Given, Wanted, input_error, locate_recipes
from actmat.run.places import OutputPlace, Writes, find_place
from actmat.settings import RunSettings


@dataclass(frozen=True)
class Opened:
    """Recipes with their opened inputs.

    Args:
        recipes: each with its kind of output, and a base, the first expert if it needs none.
        inputs: shared by all.
        place: of the run.
        problems: found so far; planning adds its own.
        began: start of the run on the performance counter.
        base_config: `config.json` of the base that is named for adapters, which tells packed projections apart.
    """

    recipes: tuple[Recipe, ...]
    inputs: Inputs
    place: OutputPlace
    problems: Problems
    began: float
    base_config: Mapping[str, Any] | None


@contextlib.contextmanager
def open_inputs(
    recipes: Sequence[Recipe], settings: RunSettings | None = None, writes: Writes = "nothing", *, here: bool = True
) -> Iterator[Opened]:
    """Open base, experts and statistics of recipes that share them, after a check of the run's places.

    Args:
        recipes: of the run.
        settings: of the run.
        writes: see `find_place`.
        here: whether the run takes place on this machine.

    Raises:
        MergeError: all inputs that cannot be opened, with all problems of the places.
    """
    began, problems, settings = time.perf_counter(), Problems(), settings or RunSettings()
    with locate_recipes(recipes, settings.held) as wanted, contextlib.ExitStack() as stack:
        decided = _decided(wanted, problems)
        chosen, given = decided or wanted.recipes, wanted.given[0] if decided else None
        check_shared(chosen)
        paths: Mapping[str, Path | str] = {} if given is None else given.paths(chosen[0].labels)
        place = find_place(chosen, settings, writes, problems, inputs=paths, here=here)
        if given is None:
            _stop(wanted, problems)
        base, experts = _opened(chosen[0], given, stack, wanted.problems)
        if wanted.problems.found:
            _stop(wanted, problems)
        if base is not None:
            known = len(problems.found)
            with problems.noted():
                base = _untied(chosen, base, experts)
                pairs = zip(chosen[0].labels, experts, strict=True)
                base = with_marks(base, {n: e.checkpoint for n, e in pairs if isinstance(e, CheckpointExpert)})
            if len(problems.found) > known:
                problems.check()
        inputs = Inputs(chosen[0].labels, base, experts, stack.enter_context(opened_statistics(chosen[0])))
        if place.outs or not here:
            with problems.noted():
                _check_copied_files(chosen, inputs)
        config = given.base.config if given.base is not None else None
        yield Opened(tuple(chosen), inputs, place, problems, began, config)


def _decided(wanted: Wanted, problems: Problems) -> Sequence[Recipe]:
    """The recipes as their inputs decide them; empty if one has a problem."""
    for recipe in wanted.recipes:
        with problems.noted():
            check_options(recipe)
    if wanted.problems.found:
        return ()
    try:
        return [decide(recipe, given) for recipe, given in zip(wanted.recipes, wanted.given, strict=True)]
    except RecipeError as error:
        problems.found.append(error)
        return ()


def _stop(wanted: Wanted, problems: Problems) -> NoReturn:
    """Raise all problems that were found."""
    if wanted.problems.found:
        problems.found.append(input_error(wanted.problems))
        named = [r for r in wanted.recipes if r.method != AUTO]
        if choices := [p for r in named for p in Chooser(r, declared_kinds(r)).problems]:
            problems.found.append(RecipeError("The recipe is not valid.", choices))
    problems.check()
    raise AssertionError("a run stops for a reason")


def _opened(
    recipe: Recipe, given: Given, stack: contextlib.ExitStack, problems: Problems
) -> tuple[Checkpoint | None, list[Expert]]:
    """The base, and the experts on it; without a base, adapters in the layout of the output.

    Args:
        recipe: with its kind of output.
        stack: closes the experts.
        problems: receives those of all inputs.
    """
    if isinstance(recipe.output, AdapterOutput):
        return None, _in_one_layout(recipe, _each([partial(e.expert, None) for e in given.experts], stack, problems))
    named = given.base or given.experts[0]  # an average is measured from any point
    bases = _each([named.model], stack, problems)
    if not bases:
        return None, []
    base, aligned = bases[0], dict[str, Checkpoint]()
    if (vocabulary := recipe.model.vocabulary) is not None:
        with problems.noted(CheckpointError):
            tables = {n: e.token_tables for n, e in zip(recipe.labels, given.experts, strict=True)}
            with_tables = {n: checkpoint for n, checkpoint in tables.items() if checkpoint is not None}
            base, aligned = vocabulary_aligner()(base, with_tables, vocabulary.policy())
        if problems.found:
            return base, []  # adapters would not fit tables of the old size
    rows = zip(recipe.labels, given.experts, strict=True)
    return base, _each([partial(_expert, aligned.get(n), e, base) for n, e in rows], stack, problems)


T = TypeVar("T", bound=Checkpoint | Expert)


def _each(opened: Sequence[Callable[[], T]], stack: contextlib.ExitStack, problems: Problems) -> list[T]:
    """Everything that can be opened; the problems of all others."""
    found: list[T] = []
    for open_input in opened:
        with problems.noted(CheckpointError):
            one = open_input()
            stack.callback(one.close)
            found.append(one)
    return found


def _expert(aligned: Checkpoint | None, given: Located, base: Checkpoint) -> Expert:
    """An expert, with the rows of the new vocabulary if it has tables.

    Raises:
        CheckpointError: an adapter has deltas for rows that are in another place there.
    """
    if aligned is not None and not given.needs_base:
        return CheckpointExpert(aligned)
    expert = (given if aligned is None else given.with_rows(aligned)).expert(base)
    if given.needs_base and not (base.keeps_rows and (aligned is None or aligned.keeps_rows)):
        tables = [n for n in expert.specs if is_token_table(n) or is_output_head(n)]
        if moved := [n for n in tables if expert.source(n).kind == "formed"]:
            raise CheckpointError(
                f"{given.place}: has a delta for '{moved[0]}', whose rows have another order in the new vocabulary. "
                "Fix: fold the adapter into its base (merge_and_unload, save_pretrained), and merge full models"
            )
    return expert


def _untied(recipes: Sequence[Recipe], base: Checkpoint, experts: Sequence[Expert]) -> Checkpoint:
    """The base, with a separate output head if experts train it apart from the table that it is tied to.

    Raises:
        CheckpointError: it cannot be untied, or not in the requested kind of output.
    """
    recipe = recipes[0]
    untied = untied_base(base, experts, recipe.labels, ties=all(r.ties for r in recipes))
    if isinstance(untied, UntiedCheckpoint) and isinstance(recipe.output, ExtractedOutput):
        raise CheckpointError(
            f"{base.location}: {untied.notes[-1]}, which an adapter of the tied base cannot hold. {FIX}."
        )
    return untied


def _in_one_layout(recipe: Recipe, experts: Sequence[Expert]) -> list[Expert]:
    """Adapters of files with the modules, names and factors of the output's layout."""
    found = [e.adapter for e in experts if e.adapter is not None]
    layout = output_layout(recipe, found)
    return [
        in_layout(e, layout) if a.layout != layout or needs_one_spelling(found) else e
        for e, a in zip(experts, found, strict=True)
    ]


def _check_copied_files(recipes: Sequence[Recipe], inputs: Inputs) -> None:
    """Refuse local folders whose config or tokenizer files cannot be copied into an output.

    Raises:
        CheckpointError: a file is a link out of its folder, or not a regular file.
    """
    if inputs.base is None or inputs.base.directory is None or isinstance(recipes[0].output, ExtractedOutput):
        return
    named = dict(zip(inputs.labels, inputs.experts, strict=True))
    for wanted in {name for r in recipes for name in (r.model.files_of, r.model.config_from)}:
        check_sidecars(_local_files(inputs.base), _local_files(named.get(wanted or "", inputs.base)))


def _local_files(one: Checkpoint | Expert) -> SideFolder | None:
    """Files in the folder of an input, without a download."""
    local = any(isinstance(s, LocalSource) for s in one.sources()) if isinstance(one, Expert) else one.directory
    folder = one.fetch_sidecars() if local else None
    return None if folder is None else SideFolder(folder, one.side_files())


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
