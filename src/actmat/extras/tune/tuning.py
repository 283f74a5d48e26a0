"""`actmat.tune` and `actmat.tune_scale`: find the best merge of some experts from a few unlabeled inputs of each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.writing.staging import OutputLock, check_output_path, disk_errors
from actmat.errors import OutputError, RecipeError, StatisticsError
from actmat.extras.collect.data import (
    SAMPLES,
    DataOptions,
    DataSource,
    by_expert,
    class_names,
    is_contrastive,
    prepare_data,
)
from actmat.extras.pages.html import write_html
from actmat.extras.tune.asking import ask_experts, mark_of
from actmat.extras.tune.evaluate import Asked, Evaluator, Trial
from actmat.extras.tune.groups import FIXED, Grouping, groups_of
from actmat.extras.tune.inputs import InputSource
from actmat.extras.tune.live import Directions, LiveModel, Loader, group_numbers
from actmat.extras.tune.memory import MemoryPlan, model_device, plan_memory, sizes_of
from actmat.extras.tune.merges import Merges, SearchInputs, peak_bytes, recipe_of, search_inputs
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
    notes_on_space,
    start_ending,
)
from actmat.extras.tune.search import Varied, choose, pareto_front, parse_budget, search
from actmat.extras.tune.settings import Effort, Pace, TuneProgress, TuneSettings, usual_tune_progress
from actmat.extras.tune.space import MergeChoice, SearchSpace, TuneCandidate, make_space
from actmat.planning.model import MergePlan
from actmat.recipe import Recipe
from actmat.recipe.arguments import Location, make_arguments
from actmat.recipe.output import Vocabulary
from actmat.run import run_recipes
from actmat.settings import RunSettings

BATCH = 4
"""Methods that are merged in one reading of the inputs."""
MADE = ("merges", "statistics", "directions")
"""Folders of the work folder that are removed in the end."""
LOCK = ".actmat-lock"
TRIALS = "trials.jsonl"
"""The journal of the trials, which also marks a work folder as one of ours."""

TuneData = DataSource | InputSource
"""Inputs of an expert: a location, `DataOptions`, or batches that are ready."""

Data = TuneData | Mapping[str, TuneData]

_SEARCH = frozenset(f.name for f in dataclasses.fields(TuneSettings)) - {"device", "dtype", "budget"}
_MOST = 2 * SAMPLES
"""Inputs per expert that are read of a location: half choose (some of these measure), half compare."""


def tune(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    data: Data,
    out: Location,
    space: SearchSpace | Mapping[str, Any] | None = None,
    budget: str | int | None = None,
    progress: TuneProgress | None = None,
    **fields: Any,
) -> TuneReport:
    """Find the best merge of some experts from a few unlabeled inputs of each, and write it.

    Every method of the space is merged once; scales are written into one model in memory and scored by the mean
    divergence `KL(expert || merged)` of the experts' own predictions on their inputs (docs/tune.md says how far to
    trust it). Half of the inputs are kept back to compare the chosen merge with the average.

    Args:
        base: as for `merge`; None: the one that the adapters name.
        experts: as for `merge`.
        data: expert -> its unlabeled inputs (32 to 256), or one data set for all: a location, `DataOptions`, or
            batches of keyword arguments of the model.
        out: directory to write; the search itself is described in `OUT.tune`.
        space: the candidates: `{"methods": [...], "scales": [...], "groups": "kind", "weights": True}`; default:
            some twelve methods, others for adapters, at up to six scales.
        budget: evaluations (200) or time ("15m").
        progress: receives callbacks.
        fields: fields of `TuneSettings` (`score`, `least_agreement`, `predict`, `load`, `model_class`, `new_tokens`,
            ...; `model_dtype` is the dtype of the models while they run), of a recipe, and of `RunSettings`.

    Returns:
        The report: the chosen recipe, all trials, the final comparison with intervals.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    recipe, settings, run = _arguments(base, experts, {"out": str(out), **fields}, budget)
    chosen = space if isinstance(space, SearchSpace) else make_space(space or {})
    return tune_recipe(recipe, chosen, data, settings, run, progress or usual_tune_progress())


def tune_scale(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    data: Data,
    out: Location,
    scales: Sequence[float] | None = None,
    progress: TuneProgress | None = None,
    **fields: Any,
) -> TuneReport:
    """Merge as `merge` does, at the scale that unlabeled inputs of the experts choose.

    The method and its options are those of the arguments; it is merged once for the search and once for the output.
    In the end, the chosen scale is compared with the one that was asked for and with the base.

    Args:
        base, experts: as for `merge`.
        data: as for `tune`.
        out: directory to write; the search is described in `OUT.tune`.
        scales: to try first; default: six from 0.3 to 2. The best is refined within a factor of 1.5.
        progress: receives callbacks.
        fields: as for `tune`; `method` and `options` among them.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    recipe, settings, run = _arguments(base, experts, {"out": str(out), **fields}, None)
    settings = dataclasses.replace(settings, average=False)
    space = functools.partial(scale_space, scales=scales)
    return tune_recipe(recipe, space, data, settings, run, progress or usual_tune_progress())


def scale_space(recipe: Recipe, scales: Sequence[float] | None = None) -> SearchSpace:
    """The method of a recipe at several scales.

    >>> space = scale_space(Recipe(experts=("a", "b"), method="ties", options={"density": 0.3}), [0.5, 1.0])
    >>> [str(c) for c in space.merges()], space.scales
    (['ties[density=0.3]'], (0.5, 1.0))
    """
    method = {"method": recipe.method, "options": {name: [value] for name, value in recipe.options.items()}}
    return make_space({"methods": [method]} | ({} if scales is None else {"scales": list(scales)}))


def _arguments(
    base: Location | None,
    experts: Sequence[Location | Mapping[str, Any]],
    fields: dict[str, Any],
    budget: str | int | None,
) -> tuple[Recipe, TuneSettings, RunSettings]:
    """Recipe and settings from the fields of all three."""
    search = {k: fields.pop(k) for k in _SEARCH & fields.keys()} | {"dtype": fields.pop("model_dtype", "float32")}
    recipe, run = make_arguments(base, experts, fields)
    return recipe, TuneSettings(budget=parse_budget(budget), **search), run


def tune_recipe(
    recipe: Recipe,
    space: SearchSpace | Callable[[Recipe], SearchSpace],
    data: Data,
    settings: TuneSettings | None = None,
    run: RunSettings | None = None,
    progress: TuneProgress | None = None,
) -> TuneReport:
    """Choose method, options and scale by the answers of the experts on unlabeled inputs, and write that merge.

    Whole models that are tried are kept in `OUT.tune` until the end, in float32, each once; merged adapters in memory.
    An interrupted search goes on from its trials.

    Args:
        recipe: base, experts, scope, rules, output; its method and scale are one candidate of the final comparison.
        space: all candidates, or a function that makes them of the recipe with a named method.
        data: as for `tune`.
        settings: of the search.
        run: of the merges.
        progress: receives callbacks.

    Raises:
        RecipeError, StatisticsError, OutputError: inputs, data or output that cannot be used; nothing is at `out`.
    """
    settings, run, progress = settings or TuneSettings(), run or RunSettings(), progress or TuneProgress()
    began = time.perf_counter()
    out = _checked_out(recipe)
    with search_inputs(recipe) as inputs, contextlib.ExitStack() as stack:
        if not isinstance(space, SearchSpace):
            recipe = inputs.recipe.model_copy(update={"base": recipe.base})
            space = space(recipe)
        sources = sources_of(recipe, data, inputs.base.config or {})
        fitted = space.fitted(to_adapters=bool(inputs.factor_bytes))
        device, note = model_device(run.device)
        settings = dataclasses.replace(settings, device=device)
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


def sources_of(recipe: Recipe, data: Data, config: Mapping[str, Any], *, whole: bool = True) -> dict[str, InputSource]:
    """Expert -> its data, of all experts if `whole`. Data sets are opened once.

    Of a location, as many inputs as are usual are read; folders of images have their classes by name where the base
    compares images with texts.
    """
    given = by_expert(recipe, data)
    if whole and (missing := [label for label in recipe.labels if label not in given]):
        raise RecipeError("Every expert needs inputs of its own.", [f"no data is given for '{m}'" for m in missing])
    sources: dict[str, InputSource] = {}
    for label, source in given.items():
        if isinstance(source, str | Path):
            source = DataOptions(str(source), max_samples=_MOST)
        if isinstance(source, DataOptions):
            sources[label] = _with_classes(label, source, config)
        elif source:
            sources[label] = source
        else:
            raise StatisticsError(f"The batches of '{label}' are empty: expected 32 to 256 inputs.")
    prepare_data({label: o for label, o in sources.items() if isinstance(o, DataOptions)})
    return sources


def _with_classes(label: str, source: DataOptions, config: Mapping[str, Any]) -> DataOptions:
    """The data with the classes of its images, by the names of their folders, if the base compares images with texts.

    Raises:
        RecipeError: images without classes, or classes for a model of another kind.
    """
    if not is_contrastive(config):
        if source.classes:
            raise RecipeError("--classes needs a model that compares images with texts, such as CLIP.")
        return source
    classes = source.classes or class_names(source.location)
    if not classes and Path(source.location).is_dir():
        raise RecipeError(
            f"The image classes of '{label}' are unknown: pass --classes {label}=a,b,c, or a folder of images with one "
            "subfolder per class."
        )
    return dataclasses.replace(source, classes=classes)


@contextlib.contextmanager
def _work_folder(out: Path, run: RunSettings) -> Iterator[Path]:
    """`OUT.tune`, locked."""
    work = out.with_name(f"{out.name}.tune")
    is_ending = (work / RECIPE).exists() and not (work / FOUND).exists()  # killed while or after the choice was merged
    problems = check_output_path(out, overwrite=run.overwrite or is_ending, inputs={})  # the merge checks again
    if (there := [n for n in MADE if (work / n).exists()]) and not (work / TRIALS).exists():
        problems.append(f"{work} holds '{there[0]}', and no search made it: choose another --out, or move it away")
    if problems:
        raise OutputError("The output cannot be written there.", problems)
    with disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = OutputLock(out, work / LOCK)
        lock.take(required=False)
        (work / TRIALS).touch()
    try:
        yield work
    finally:
        lock.release()


def _remove_made(work: Path) -> None:
    """Remove the folders of a search; each is renamed first, so that a kill leaves no half of a merge to be used."""
    for name in MADE:
        aside = work / f".removed-{name}"
        for folder in (aside, work / name):
            if folder.exists():
                folder.rename(aside)
                shutil.rmtree(aside)


class _Search:
    """The steps of one search."""

    def __init__(
        self,
        given: Recipe,
        inputs: SearchInputs,
        space: SearchSpace,
        settings: TuneSettings,
        run: RunSettings,
        progress: TuneProgress,
        work: Path,
    ) -> None:
        own = inputs.recipe
        self.own = MergeChoice(own.method, own.options, space=own.space if own.space != given.space else None)
        # without the note of `auto` why it took a method, and its space, which is of that method
        self.given = own.model_copy(update={"base": given.base, "notes": given.notes, "space": given.space})
        self.space, self.settings = space, settings
        self.run, self.progress, self.work = run, progress, work
        self.notes: list[str] = []
        self.base, self.loader = inputs.base, settings.loader(own.base)
        self.factor_bytes = inputs.factor_bytes if self.loader.given is None else 0

    def say(self, note: str) -> None:
        """A note now, and in the report."""
        self.notes.append(note)
        self.progress.note(note)

    def report(self, data: Mapping[str, InputSource], began: float) -> TuneReport:
        """Ask the experts, merge, search, compare, write the chosen merge."""
        recipe = self.given.model_copy(update={"base": self.loader.base, "output": self.given.model, "out": None})
        memory = self._planned(recipe, data)
        collected = self.work / "statistics"
        recipe, asked = ask_experts(
            recipe, data, self.settings, self.loader, self.space.statistics, collected, self.progress
        )
        inner = dataclasses.replace(self.run, overwrite=False, diagnose=False, durable=False, sha256=False)
        merges = Merges(recipe, self.work / "merges", inner, factor_bytes=self.factor_bytes)
        choices = self._merged(merges)
        for note in notes_on_space(self.space, choices):
            self.say(note)
        folder = self.work / "directions" if memory.held == "files" else None
        live, groups = open_live(merges.whole_plan(choices[0]), self.space.groups, self.loader, self.base, folder)
        evaluator = self._evaluator(live, merges, asked, memory)
        trials = self._trials(choices, asked, groups, evaluator)
        least = self.settings.least_agreement
        chosen, allowed = choose(trials, least)
        finals = self._finals(chosen.candidate, evaluator, merges)
        made = recipe_of(recipe, chosen.candidate.merge, chosen.candidate.scale)
        final = final_recipe(made, self.given, chosen.candidate, groups, self.work, collected)
        self.progress.doing("merging the chosen one")
        start_ending(final, self.work)
        (merged,) = run_recipes([final], self.run, draw=write_html)
        report = TuneReport(
            out=Path(str(final.out)),
            recipe=final,
            chosen=chosen,
            trials=trials,
            front=pareto_front(trials),
            finals=finals,
            score=self.settings.score_name,
            refused=merges.refused,
            notes=[*self.notes, *notes_on_choice(finals, allowed=allowed, least_agreement=least)],
            seconds=time.perf_counter() - began,
            memory=memory,
            merged=merged,
        )
        with disk_errors(self.work):
            write_tune(report, self.work / PAGE)
            if not self.settings.keep:
                _remove_made(self.work)
            report.save(self.work)  # last: then the search is complete, and is not given again
        return report

    def _planned(self, recipe: Recipe, data: Mapping[str, InputSource]) -> MemoryPlan:
        """The memory plan, checked and told."""
        merges = Merges(recipe, self.work, self.run, factor_bytes=self.factor_bytes)
        plan = plan_memory(
            self.base.specs,
            sizes_of(data, self.base.config or {}, self.settings.new_tokens),
            self.run,
            dtype=self.settings.dtype,
            merging=peak_bytes(recipe, [MergeChoice("average"), self.own]),
            merges=[self.factor_bytes * merges.is_factored(c) for c in self.space.merges()],
            gram="gram" in self.space.statistics,
        )
        plan.check()
        self.progress.planned(plan)
        if (why := plan.why_files) is not None:
            self.notes.append(why)
        return plan

    def _merged(self, merges: Merges) -> list[MergeChoice]:
        """The choices of the space that can be merged.

        Raises:
            RecipeError: none can.
        """
        choices, made, start = sorted(self.space.merges(), key=lambda c: not merges.is_factored(c)), [], 0
        while start < len(choices):
            batch = choices[start : start + (1 if merges.is_factored(choices[start]) else BATCH)]
            self.progress.doing(f"merging {', '.join(map(str, batch))} ({start + 1} of {len(choices)})")
            made += merges.make(batch)
            start += len(batch)
        if not made:
            raise RecipeError("None of the methods can merge these experts.", merges.refused.values())
        return made

    def _evaluator(self, live: LiveModel, merges: Merges, asked: Mapping[str, Asked], memory: MemoryPlan) -> Evaluator:
        settings = self.settings
        inputs = {label: a.inputs for label, a in asked.items()}
        mark = mark_of(inputs, settings.score_name, settings.dtype, merges.mark)
        directions = Directions(live, self.base, merges, self.loader, memory.deltas)
        return Evaluator(live, directions, asked, settings.score, self.work / TRIALS, mark=mark)

    def _trials(
        self,
        choices: Sequence[MergeChoice],
        asked: Mapping[str, Asked],
        groups: Mapping[str, str],
        evaluator: Evaluator,
    ) -> list[Trial]:
        names = sorted({g for g in groups.values() if g != FIXED}) if self.space.groups != "none" else []
        predictions = min(sum(len(b.best_P) for b in a.search) for a in asked.values())
        varied = Varied(predictions, names, len(asked) if self.space.weights else 0, self.settings.seed)
        effort = Effort(len(choices), len(self.space.scales), varied, self.settings.budget.evaluations)
        pace = Pace(effort, sum(a.seconds for a in asked.values()), self.progress)
        self.progress.doing(
            f"searching: {len(choices)} merges, about {effort.trials} trials, {pace.left:.0f} s with the comparison"
        )
        return search(self.space, choices, evaluator, self.settings.budget, varied, pace.add)

    def _finals(self, chosen: TuneCandidate, evaluator: Evaluator, merges: Merges) -> list[Rival]:
        """The chosen merge, the average, the recipe's own method at its own scale, and the base, on unseen inputs."""
        self.progress.doing("comparing on inputs that were kept back")
        assert isinstance(self.given.scale, float), "checked by `tune_recipe`"
        own = self.own
        rivals = {f"{own} x {self.given.scale:g} (the recipe's)": TuneCandidate(own, self.given.scale)}
        if self.settings.average:
            rivals = {"average": TuneCandidate(MergeChoice("average"), 1.0), **rivals}
        found = {f"{chosen} (chosen)": evaluator.final(chosen)}
        made = {c.key for c in merges.make([c.merge for c in rivals.values()])}
        for name, candidate in rivals.items():
            if candidate.merge.key in made and candidate.key != chosen.key:
                found[name] = evaluator.final(candidate)
        found["base"] = evaluator.final(None)
        return compare_finally(found, self.settings.score, self.settings.seed)


def open_live(
    plan: MergePlan, grouping: Grouping, loader: Loader, base: Checkpoint, folder: Path | None = None
) -> tuple[LiveModel, dict[str, str]]:
    """The live model, and the group of every tensor.

    Args:
        plan: of a merge at scale 1; says which tensors the scale reaches.
        base: the checkpoint that `loader` loads.
        folder: for files of base and deltas; None: these stay in memory.
    """
    groups = groups_of(plan, grouping)
    names = tuple(dict.fromkeys(groups.values()))
    model = loader.load(loader.base).model
    return LiveModel(model, names, group_numbers(model, base, groups, names), folder), groups
