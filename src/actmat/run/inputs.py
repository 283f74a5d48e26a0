"""Open the inputs of recipes together, with all problems in one error; they decide the kind of output."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn, TypeVar

from actmat.checkpoints.marks import with_marks
from actmat.checkpoints.model import Model
from actmat.checkpoints.source import LocalSource
from actmat.checkpoints.writing.sidecars import check_sidecars
from actmat.engine.content import check_adapters
from actmat.engine.inputs import Inputs
from actmat.engine.resources import one_thread
from actmat.errors import CheckpointError, Problems, RecipeError
from actmat.experts.deltas import Deltas
from actmat.experts.locate import (
    OpenInput,
    fields_of,
    fit_expert,
    in_layout,
    require_model,
    stored_of,
    token_tables,
    without,
)
from actmat.experts.stored import StoredDeltas
from actmat.experts.untied import FIX, untied_base
from actmat.layout.patterns import compile_pattern
from actmat.layout.ties import is_output_head, is_token_table
from actmat.planning.choose import Chooser
from actmat.planning.implied import needs_one_spelling, output_layout
from actmat.planning.statistics import declared_kinds, opened_statistics
from actmat.recipe import Recipe
from actmat.recipe.output import AdapterOutput, ExtractedOutput
from actmat.recipe.vocabulary import vocabulary_aligner
from actmat.run.automatic import AUTO, check_options
from actmat.run.decide import check_shared, decide
from actmat.run.locate import Located, input_error, locate_recipes
from actmat.run.places import Places, Writes, find_places
from actmat.settings import RunSettings


@contextlib.contextmanager
def open_inputs(
    recipes: Sequence[Recipe], settings: RunSettings | None = None, writes: Writes = "nothing", *, here: bool = True
) -> Iterator[tuple[Inputs, Places]]:
    """Open base, experts and statistics of recipes that share them, after a check of the run's places.

    Args:
        recipes: of the run.
        settings: of the run.
        writes: see `find_places`.
        here: whether the run takes place on this machine.

    Raises:
        MergeError: all inputs that cannot be opened, with all problems of the places.
    """
    began, problems, of_inputs, settings = time.perf_counter(), Problems(), Problems(), settings or RunSettings()
    with locate_recipes(recipes, settings.held, of_inputs) as located, contextlib.ExitStack() as stack:
        decided = _decide_all(located, problems, of_inputs)
        chosen = decided or tuple(inputs.recipe for inputs in located)
        check_shared(chosen)
        paths = located[0].paths if decided else {}
        places = find_places(chosen, settings, writes, problems, inputs=paths, here=here)
        if not decided:
            _stop(chosen, problems, of_inputs)
        base, experts = _open_first(chosen[0], located[0], stack, of_inputs)
        if of_inputs.found:
            _stop(chosen, problems, of_inputs)
        if base is not None:
            known = len(problems.found)
            with problems.noted():
                base = _untied(chosen, base, experts)
                pairs = zip(chosen[0].labels, experts, strict=True)
                base = with_marks(base, {n: e.model for n, e in pairs if not e.needs_base})
            if len(problems.found) > known:
                problems.check()
        statistics = stack.enter_context(opened_statistics(chosen[0]))
        config = fields_of(located[0].base) if located[0].base is not None else None
        inputs = Inputs(chosen, base, experts, statistics, config, problems, began)
        if places.outs or not here:
            with problems.noted():
                _check_copied_files(inputs)
        yield inputs, places


def _decide_all(located: Sequence[Located], problems: Problems, of_inputs: Problems) -> tuple[Recipe, ...]:
    """The recipes as their inputs decide them; empty if one has a problem."""
    for inputs in located:
        with problems.noted():
            check_options(inputs.recipe)
    if of_inputs.found:
        return ()
    try:
        return tuple(map(decide, located))
    except RecipeError as error:
        problems.found.append(error)
        return ()


def _stop(recipes: Sequence[Recipe], problems: Problems, of_inputs: Problems) -> NoReturn:
    """Raise all problems that were found."""
    if of_inputs.found:
        problems.found.append(input_error(of_inputs))
        named = [r for r in recipes if r.method != AUTO]
        if choices := [p for r in named for p in Chooser(r, declared_kinds(r)).problems]:
            problems.found.append(RecipeError("The recipe is not valid.", choices))
    problems.check()
    raise AssertionError("a run stops for a reason")


def _open_first(
    recipe: Recipe, located: Located, stack: contextlib.ExitStack, problems: Problems
) -> tuple[Model | None, list[Deltas]]:
    """The base, and the experts on it; without a base, adapters in the layout of the output.

    Args:
        recipe: with its kind of output.
        stack: closes the experts.
        problems: receives those of all inputs.
    """
    of_experts = _without_dropped(recipe, located.experts, problems)
    if isinstance(recipe.output, AdapterOutput):
        experts = _each([partial(fit_expert, e, None) for e in of_experts], stack, problems)
        return None, _in_one_layout(recipe, experts)
    named = located.base or located.experts[0]  # an average is measured from any point
    bases = _each([partial(require_model, named)], stack, problems)
    if not bases:
        return None, []
    base, aligned, moved = bases[0], dict[str, Model](), set[str]()
    if (vocabulary := recipe.model.vocabulary) is not None:
        with problems.noted(CheckpointError):
            tables = {n: token_tables(e) for n, e in zip(recipe.labels, of_experts, strict=True)}
            with_tables = {n: model for n, model in tables.items() if model is not None}
            base, aligned, labels = vocabulary_aligner()(base, with_tables, vocabulary)
            moved = set(labels)
        if problems.found:
            return base, []  # adapters would not fit tables of the old size
    rows = zip(recipe.labels, of_experts, strict=True)
    openers = [partial(_expert, aligned.get(n), e, base, moved=bool(moved & {"base", n})) for n, e in rows]
    return base, _each(openers, stack, problems)


def _without_dropped(recipe: Recipe, experts: Sequence[OpenInput], problems: Problems) -> list[OpenInput]:
    """The experts without the tensors that the recipe leaves out; a pattern that matches none is a problem."""
    names = [n for e in experts for n in stored_of(e).specs] if recipe.drop else []
    if unused := [p for p in recipe.drop if not any(map(compile_pattern(p), names))]:
        problems.found.append(
            RecipeError(f"drop: '{unused[0]}' matches no tensor of the experts, such as '{names[0]}'")
        )
    return [without(e, recipe.drop) for e in experts]


T = TypeVar("T", bound=Model | Deltas)


def _each(openers: Sequence[Callable[[], T]], stack: contextlib.ExitStack, problems: Problems) -> list[T]:
    """Everything that can be opened; the problems of all others."""
    inputs: list[T] = []
    for open_input in openers:
        with problems.noted(CheckpointError):
            opened = open_input()
            stack.callback(opened.close)
            inputs.append(opened)
    return inputs


def _expert(aligned: Model | None, located: OpenInput, base: Model, *, moved: bool) -> Deltas:
    """An expert, with the rows of the new vocabulary if it has tables.

    Args:
        moved: rows of its tables, or of the base's, have other numbers there.

    Raises:
        CheckpointError: an adapter has deltas for rows that are in another place there.
    """
    if aligned is not None:
        if isinstance(located, Model):
            return StoredDeltas(aligned)
        located = located.with_rows(aligned)
    expert = fit_expert(located, base)
    if expert.needs_base and moved:
        tables = [n for n in expert.specs if is_token_table(n) or is_output_head(n)]
        if changed := [n for n in tables if expert.source(n).kind == "formed"]:
            raise CheckpointError(
                f"{expert.location}: has a delta for '{changed[0]}', whose rows have another order in the new "
                "vocabulary. Fix: fold the adapter into its base (merge_and_unload, save_pretrained), and merge full "
                "models"
            )
    return expert


def _untied(recipes: Sequence[Recipe], base: Model, experts: Sequence[Deltas]) -> Model:
    """The base, with a separate output head if experts train it apart from the table that it is tied to.

    Raises:
        CheckpointError: it cannot be untied, or not in the requested kind of output.
    """
    recipe = recipes[0]
    untied = untied_base(base, experts, recipe.labels, ties=all(r.ties for r in recipes))
    if untied.folder.untied and isinstance(recipe.output, ExtractedOutput):
        raise CheckpointError(
            f"{base.location}: {untied.folder.notes[-1].text}, which an adapter of the tied base cannot hold. {FIX}."
        )
    return untied


def _in_one_layout(recipe: Recipe, experts: Sequence[Deltas]) -> list[Deltas]:
    """Adapters of files with the modules, names and factors of the output's layout."""
    adapters = [e.adapter for e in experts if e.adapter is not None]
    layout = output_layout(recipe, adapters)
    return [
        in_layout(e, layout) if a.layout != layout or needs_one_spelling(adapters) else e
        for e, a in zip(experts, adapters, strict=True)
    ]


def _check_copied_files(inputs: Inputs) -> None:
    """Refuse local folders whose config or tokenizer files cannot be copied into an output.

    Raises:
        CheckpointError: a file is a link out of its folder, or not a regular file.
    """
    recipes = inputs.recipes
    if inputs.base is None or isinstance(recipes[0].output, ExtractedOutput):
        return
    folders = {label: e.model.folder for label, e in zip(inputs.labels, inputs.experts, strict=True)}
    wanted = {name or "" for r in recipes for name in (r.model.files_of, r.model.config_from)}
    chosen = [inputs.base.folder, *(folders[name] for name in wanted if name in folders)]
    check_sidecars(*(folder for folder in chosen if isinstance(next(iter(folder.files), None), LocalSource)))


def check_values(inputs: Inputs) -> None:
    """Refuse adapters with NaN or Inf, and statistics of other models, before the work begins.

    Raises:
        CheckpointError, StatisticsError: each lists all.
    """
    with one_thread():  # sums of small tensors: others would only wait for each other
        rows = zip(inputs.labels, inputs.experts, strict=True)
        problems = [p for label, e in rows if e.stored is not None for p in e.stored.check_values(label)]
    if problems:
        raise CheckpointError(f"The adapters hold values that cannot be merged: {len(problems)} problem(s).", problems)
    check_adapters(inputs)
