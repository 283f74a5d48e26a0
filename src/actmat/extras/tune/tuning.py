"""Find the best merge of some experts from a few unlabeled inputs of each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.checkpoints.writing.staging import OutputLock, check_output_path, disk_errors
from actmat.errors import OutputError, RecipeError, StatisticsError
from actmat.extras.collect.data import SAMPLES, DataOptions, by_expert, prepare_data
from actmat.extras.models.layered import Placement
from actmat.extras.pages.html import write_html
from actmat.extras.tune.asking import ExpertData, ask_experts
from actmat.extras.tune.evaluate import Asked, Evaluator, Trial
from actmat.extras.tune.kept import Asking
from actmat.extras.tune.live import Live, LiveAdapter, LiveModel, fixed_tensors
from actmat.extras.tune.memory import model_device, place_models, planned_memory
from actmat.extras.tune.merges import Merges, SearchInputs, mark_of, recipe_of, search_inputs
from actmat.extras.tune.page import write_tune
from actmat.extras.tune.report import (
    FOUND,
    PAGE,
    RECIPE,
    Rival,
    TuneReport,
    compare_finally,
    final_recipe,
    notes_on_choice,
    start_ending,
)
from actmat.extras.tune.search import SearchBudget, choose, expected_trials, pareto_front, search
from actmat.extras.tune.settings import TuneSettings
from actmat.extras.tune.sources import DataRows, InputSettings, check_every_expert, with_classes
from actmat.extras.tune.space import MergeChoice, SearchSpace, TuneCandidate
from actmat.progress import Progress
from actmat.recipe import Recipe
from actmat.recipe.output import AdapterOutput
from actmat.recipe.vocabulary import Vocabulary
from actmat.run import plan_recipe, run_recipes
from actmat.settings import RunSettings

MADE = ("merges", "statistics")
"""Folders of the work folder that are removed in the end; statistics that the chosen merge needs stay."""
LOCK = ".actmat-lock"
TRIALS = "trials.jsonl"
"""The journal of the trials, which also marks a work folder as one of ours."""

READ = 2 * SAMPLES
"""Inputs per expert that are read of a location: half choose (some of these measure), half compare."""


def tune_recipe(
    recipe: Recipe,
    space: SearchSpace | Callable[[Recipe], SearchSpace],
    data: Any,
    settings: TuneSettings | None = None,
    run: RunSettings | None = None,
    progress: Progress | None = None,
) -> TuneReport:
    """Choose method, options and scale by the answers of the experts on unlabeled inputs, and write that merge.

    Merges that are tried are kept in `OUT.tune` until the end. An interrupted search goes on from its trials.

    Args:
        recipe: base, experts, scope, rules, output; its method and scale are one candidate of the final comparison.
        space: all candidates, or a function that makes them of the recipe with a named method.
        data: as for `actmat.tune`.
        settings: of the search.
        run: of the merges.
        progress: receives callbacks.

    Raises:
        RecipeError, StatisticsError, OutputError: inputs, data or output that cannot be used; nothing is at `out`.
    """
    settings, run, progress = settings or TuneSettings(), run or RunSettings(), progress or Progress()
    began = time.perf_counter()
    out = _checked_out(recipe)
    with search_inputs(recipe) as inputs, contextlib.ExitStack() as stack:
        if not isinstance(space, SearchSpace):
            recipe = inputs.recipe.model_copy(update={"base": recipe.base})
            space = space(recipe)
        sources = _sources_of(recipe, data, settings, inputs.base.config or {})
        sizes = [
            len(d.rows) if isinstance(d, DataRows) else sum(len(next(iter(b.values()))) for b in d)
            for d in sources.values()
        ]
        fitted = space.fitted(-(-min(sizes) // 4), to_adapters=inputs.are_adapters)
        device, note = model_device(run.device)
        settings = dataclasses.replace(settings, model_dtype=Placement(device, settings.model_dtype).running)
        work = stack.enter_context(_work_folder(out, run))
        searching = _Search(recipe, inputs, fitted, settings, run, progress, work)
        if note:
            searching.say(note)
        return searching.report(sources, began)


def _checked_out(recipe: Recipe) -> Path:
    """The output folder of a recipe that can be searched around.

    Raises:
        RecipeError, OutputError: it has no output or one at a URL, numbers that vary, or a vocabulary of its own.
    """
    if recipe.out is None:
        raise RecipeError("No output given: pass --out, or 'out' in the recipe.")
    if not isinstance(recipe.scale, float) or not all(isinstance(w, float) for w in recipe.weights):
        raise RecipeError("A search needs plain numbers: give 'scale' and weights without gradients and entries.")
    if "://" in recipe.out:
        raise OutputError(f"{recipe.out} is a URL: tune writes to a local folder; copy that when it is complete.")
    if recipe.model.vocabulary not in (None, Vocabulary(source="base")):
        raise RecipeError(
            "tune compares predictions over one vocabulary, and the recipe's 'vocabulary' gives the merged model "
            "another than the base's. Fix: tune with 'vocabulary: base', then merge with the choice"
        )
    return Path(recipe.out)


def _sources_of(recipe: Recipe, data: Any, settings: TuneSettings, config: Mapping[str, Any]) -> dict[str, ExpertData]:
    """Expert -> its data; data sets are read. Of a location, as many inputs as are usual are read."""
    by_name = by_expert(recipe, data)
    check_every_expert(recipe, by_name)
    reading = InputSettings(reading=DataOptions("", max_samples=READ))
    sources: dict[str, ExpertData] = {}
    options: dict[str, DataOptions] = {}
    for label, source in by_name.items():
        if isinstance(source, str | Path | DataOptions):
            options[label] = with_classes(label, reading.source(source, measured=True), config)
        elif source:
            sources[label] = source
        else:
            raise StatisticsError(f"The batches of '{label}' are empty: expected 8 to 256 inputs.")
    return sources | {label: DataRows(options[label], rows) for label, rows in prepare_data(options).items()}


@contextlib.contextmanager
def _work_folder(out: Path, run: RunSettings) -> Iterator[Path]:
    """`OUT.tune`, locked."""
    work = out.with_name(f"{out.name}.tune")
    is_ending = (work / RECIPE).exists() and not (work / FOUND).exists()  # killed while or after the choice was merged
    problems = check_output_path(out, overwrite=run.overwrite or is_ending, inputs={})  # the merge checks again
    if (foreign := [n for n in MADE if (work / n).exists()]) and not (work / TRIALS).exists():
        problems.append(f"{work} holds '{foreign[0]}', and no search made it: choose another --out, or move it away")
    if problems:
        raise OutputError("The output cannot be written there.", problems)
    with disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = OutputLock(out, work / LOCK)
        lock.take()
        (work / TRIALS).touch()
    try:
        yield work
    finally:
        lock.release()


def _remove_made(work: Path, names: Sequence[str]) -> None:
    """Remove folders of a search; each is renamed first, so that a kill leaves no half of a merge to be used."""
    for name in names:
        aside = work / f".removed-{name}"
        for folder in (aside, work / name):
            if folder.exists():
                folder.rename(aside)
                shutil.rmtree(aside)


class _Search:
    """The steps of one search."""

    def __init__(
        self,
        recipe: Recipe,
        inputs: SearchInputs,
        space: SearchSpace,
        settings: TuneSettings,
        run: RunSettings,
        progress: Progress,
        work: Path,
    ) -> None:
        named = inputs.recipe
        self.own = MergeChoice(named.method, named.options, space=named.space if named.space != recipe.space else None)
        # without the note of `auto` why it took a method, and its space, which is of that method
        self.given = named.model_copy(update={"base": recipe.base, "notes": recipe.notes, "space": recipe.space})
        self.space, self.settings = space, settings
        self.run, self.progress, self.work = run, progress, work
        self.notes: list[str] = []
        self.base, self.loader = inputs.base, settings.loader(named.base, place_models(run, settings.model_dtype))
        self.are_adapters = inputs.are_adapters and settings.load is None

    def say(self, note: str) -> None:
        """A note now, and in the report."""
        self.notes.append(note)
        self.progress.note(note)

    def report(self, data: Mapping[str, ExpertData], began: float) -> TuneReport:
        """Ask the experts, merge, search, compare, write the chosen merge."""
        settings = self.settings
        output = AdapterOutput() if self.are_adapters else self.given.model
        recipe = self.given.model_copy(update={"base": self.loader.base, "output": output, "out": None})
        self._tell_memory(len(data))
        plan_recipe(recipe_of(recipe, MergeChoice("task_arithmetic")), held=self.run.held)  # refuses before it loads
        asking = Asking(self.loader, InputSettings(new_tokens=settings.new_tokens), self.progress)
        recipe, asked, mark = ask_experts(recipe, data, settings, asking, self.space.statistics, self.work)
        inner = dataclasses.replace(self.run, overwrite=False, diagnose=False, durable=False)
        merges = Merges(recipe, self.work / "merges", inner, self.progress)
        budget = SearchBudget(settings.budget, None if settings.minutes is None else 60 * settings.minutes)
        made = self._made(merges, budget)
        if (first := next(made, None)) is None:
            raise RecipeError("None of the methods can merge these experts.", merges.refused.values())
        evaluator = self._evaluator(merges, first, asked, mark)
        trials = self._trials(itertools.chain([first], made), evaluator, budget)
        chosen, allowed = choose(trials, settings.least_agreement)
        finals = self._finals(chosen.candidate, evaluator, merges)
        final = final_recipe(recipe_of(recipe, chosen.candidate.merge, chosen.candidate.scale), self.given)
        start_ending(final, self.work)
        (merged,) = run_recipes([final], self.run, self.progress, draw=write_html, doing="merging the chosen")
        report = TuneReport(
            out=Path(str(final.out)),
            recipe=final,
            chosen=chosen,
            trials=trials,
            front=pareto_front(trials),
            finals=finals,
            score=settings.score_name,
            refused=merges.refused,
            notes=[*self.notes, *notes_on_choice(finals, allowed=allowed, least_agreement=settings.least_agreement)],
            seconds=time.perf_counter() - began,
            merged=merged,
        )
        with disk_errors(self.work):
            write_tune(report, self.work / PAGE)
            if not settings.keep_work:
                needs = any(e.statistics and self.work in Path(e.statistics).parents for e in final.experts)
                _remove_made(self.work, MADE[: 1 if needs else 2])
            report.save(self.work)  # last: then the search is complete, and is not given again
        return report

    def _tell_memory(self, experts: int) -> None:
        """Tell what will be held, or refuse it."""
        line = planned_memory(
            self.base.specs,
            self.loader.place,
            merges=len(self.space.merges) + 1,
            factors=self.are_adapters,
            statistics=experts if self.space.statistics else 0,
        )
        if self.are_adapters and (layers := self.loader.place.layers(self.base.specs)):
            self.say(layers)
        self.progress.note(line)

    def _evaluator(self, merges: Merges, first: MergeChoice, asked: Mapping[str, Asked], mark: str) -> Evaluator:
        live: Live
        if self.are_adapters:
            live = LiveAdapter(self.loader)
        else:
            live = LiveModel(self.loader, self.base, fixed_tensors(merges.plans[first.key]))
        mark = mark_of(mark, self.settings.score_name, self.settings.model_dtype, merges.mark)
        return Evaluator(live, merges, asked, self.settings.score, self.work / TRIALS, mark=mark)

    def _made(self, merges: Merges, budget: SearchBudget) -> Iterator[MergeChoice]:
        """The choices that can be merged, each made when it is asked for."""
        for choice in self.space.merges:
            if merges.plans and budget.is_spent:
                return
            yield from merges.make([choice])

    def _trials(self, choices: Iterable[MergeChoice], evaluator: Evaluator, budget: SearchBudget) -> list[Trial]:
        """Every trial, told as it is there."""
        total = expected_trials(len(self.space.merges), len(self.space.scales), budget)
        began, done = time.perf_counter(), 0
        best: Trial | None = None

        def told(trial: Trial) -> None:
            nonlocal best, done
            done += 1
            self.progress.doing("searching", total)
            best = trial if best is None else min(trial, best, key=lambda t: t.mean)
            if done == 1:
                shares = ", ".join(f"{label} {share:.0%}" for label, share in trial.agreement.items())
                self.progress.note(
                    f"the first merge, {trial.candidate}, keeps of the experts' answers: {shares}; about {total - 1} "
                    f"more trials follow, {(total - 1) * (time.perf_counter() - began):.0f} s"
                )
            self.progress.trial(trial, best)
            self.progress.done(min(done, total))

        return search(self.space, choices, evaluator, budget, told)

    def _finals(self, chosen: TuneCandidate, evaluator: Evaluator, merges: Merges) -> list[Rival]:
        """The chosen merge, the average, the recipe's own method at its own scale, and the base, on unseen inputs."""
        assert isinstance(self.given.scale, float), "checked by `tune_recipe`"
        choice = self.own
        rivals = {f"{choice} x {self.given.scale:g} (the recipe's)": TuneCandidate(choice, self.given.scale)}
        if self.settings.average:
            rivals = {"average": TuneCandidate(MergeChoice("average"), 1.0), **rivals}
        made = {c.key for c in merges.make([c.merge for c in rivals.values()])}
        self.progress.doing("comparing on inputs that were kept back", len(rivals) + 2)
        comparisons = {f"{chosen} (chosen)": evaluator.final(chosen)}
        for name, candidate in rivals.items():
            self.progress.done(len(comparisons))
            if candidate.merge.key in made and candidate.key != chosen.key:
                comparisons[name] = evaluator.final(candidate)
        comparisons["base"] = evaluator.final(None)
        return compare_finally(comparisons, self.settings.score)
