"""`tune`: find the best merge of some experts from a few unlabelled inputs of each."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from actmat.checkpoints.resolve import open_checkpoint
from actmat.errors import OutputError, RecipeError, StatisticsError
from actmat.experts.resolve import is_adapter, open_adapter
from actmat.extras.collect.api_agreement import DataSource, data_of, prepare_data
from actmat.extras.collect.data import DataOptions
from actmat.extras.tune.asking import Questioner, load_with, mark_of
from actmat.extras.tune.evaluate import Evaluator, Trial
from actmat.extras.tune.finishing import final_recipe, notes_on_choice, notes_on_space
from actmat.extras.tune.groups import groups_of, scaled_names
from actmat.extras.tune.inputs import Source
from actmat.extras.tune.live import FIXED, Direction, LiveModel, group_numbers, state_of
from actmat.extras.tune.memory import MemoryPlan, model_device, plan_memory, sizes_of
from actmat.extras.tune.merges import Merges, number_checkpoint
from actmat.extras.tune.page import write_tune
from actmat.extras.tune.report import Rival, TuneReport, compare_finally
from actmat.extras.tune.search import Around, choose, pareto_front, search
from actmat.extras.tune.settings import TuneProgress, TuneSettings
from actmat.extras.tune.space import Candidate, MergeChoice, Space
from actmat.recipe import Recipe
from actmat.recipe.output import Model, Vocabulary
from actmat.run import run_recipes
from actmat.settings import RunSettings

__all__ = ["TuneData", "open_live", "tune_recipe"]

BATCH = 4
"""Methods that are merged in one reading of the inputs."""
MADE = ("merges", "statistics", "groups", "directions")
"""Folders of the work folder that are removed in the end."""

TuneData = DataSource | Source
"""Inputs of an expert: a location, `DataOptions`, or batches that are ready."""


def tune_recipe(
    recipe: Recipe,
    space: Space,
    data: Mapping[str, TuneData],
    settings: TuneSettings | None = None,
    run: RunSettings | None = None,
    progress: TuneProgress | None = None,
) -> TuneReport:
    """Choose method, options and scale by the answers of the experts on unlabelled inputs, and write that merge.

    The merges that are tried are kept in `OUT.tune` until the end, in float32, each once; an interrupted search goes on
    from there.

    Args:
        recipe: base, experts, scope, rules, output; its method and scale are one candidate of the final comparison.
        space: what is tried.
        data: expert -> its inputs.
        settings: of the search.
        run: of the merges.
        progress: receives callbacks.

    Raises:
        RecipeError, StatisticsError, OutputError: inputs, data or output that cannot be used; nothing is at `out`.
    """
    settings, run, progress = settings or TuneSettings(), run or RunSettings(), progress or TuneProgress()
    began = time.perf_counter()
    if recipe.out is None:
        raise RecipeError("Where shall the merged model go? Give --out, or 'out' in the recipe.")
    if not isinstance(recipe.scale, float) or not all(isinstance(w, float) for w in recipe.weights):
        raise RecipeError("A search needs plain numbers: give 'scale' and weights without gradients and entries.")
    if "://" in recipe.out:
        raise OutputError(f"{recipe.out} is a URL: tune writes to a local folder; copy that when it is complete.")
    options = _sources(recipe, data)
    device, note = model_device(run.device)
    with _work_folder(Path(recipe.out), run, keep=settings.keep) as work:
        chosen = dataclasses.replace(settings, device=device)
        searched = _Search(recipe, space, options, chosen, run, progress, work)
        if note:
            searched.say(note)
        return searched.report(began)


def _sources(recipe: Recipe, data: Mapping[str, TuneData]) -> dict[str, Source]:
    """Expert -> its data; data sets are opened once."""
    ready: dict[str, Source] = {}
    located: dict[str, DataSource] = {}
    for label, given in data.items():
        if isinstance(given, str | Path | DataOptions):
            located[label] = given
        elif not given:
            raise StatisticsError(f"The batches of '{label}' are empty: expected 32 to 256 inputs.")
        else:
            ready[label] = given
    options: dict[str, Source] = {**(data_of(recipe, located) if located else {}), **ready}
    if missing := [label for label in recipe.labels if label not in options]:
        raise RecipeError("Every expert needs inputs of its own.", [f"no data is given for '{m}'" for m in missing])
    if unknown := [label for label in ready if label not in recipe.labels]:
        raise RecipeError(f"Data is given for '{unknown[0]}', and no expert has this name: {', '.join(recipe.labels)}")
    prepare_data({label: o for label, o in options.items() if isinstance(o, DataOptions)})
    return {label: options[label] for label in recipe.labels}


@contextlib.contextmanager
def _work_folder(out: Path, run: RunSettings, *, keep: bool) -> Iterator[Path]:
    """`OUT.tune`, of which the merges are removed at the end of a search that came to its end."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]) and not run.overwrite:
        raise OutputError(f"{out} exists. Choose another --out, or pass --overwrite.")
    work = out.with_name(f"{out.name}.tune")
    work.mkdir(parents=True, exist_ok=True)
    yield work
    if not keep:
        for name in MADE:
            shutil.rmtree(work / name, ignore_errors=True)


class _Search:
    """The steps of one search."""

    def __init__(
        self,
        recipe: Recipe,
        space: Space,
        data: Mapping[str, Source],
        settings: TuneSettings,
        run: RunSettings,
        progress: TuneProgress,
        work: Path,
    ) -> None:
        if recipe.model.vocabulary not in (None, Vocabulary(source="base")):
            raise RecipeError(
                "tune compares predictions over one vocabulary, and the recipe's 'vocabulary' gives the merged model "
                "another than the base's. Fix: tune with 'vocabulary: base', then merge with the choice"
            )
        self.space, self.settings, self.run = space, settings, run
        self.progress, self.work = progress, work
        self.given = recipe
        self.notes: list[str] = []
        self.base = recipe.base or _base_of_adapters(recipe)
        self.load = load_with(settings, self.base)
        self.inner = dataclasses.replace(run, overwrite=False, diagnose=False, durable=False, sha256=False)
        wanted = recipe.model_copy(
            update={
                "base": self.base,
                "output": recipe.output if isinstance(recipe.output, Model) else Model(),
                "out": None,
            }
        )
        self.memory = self._planned(wanted, data)
        kinds, collected = space.statistics, work / "statistics"
        questioner = Questioner(data, settings, kinds, collected, self.load, progress.doing)
        asking, self.asked = questioner.ask(wanted)
        self.merges = Merges(asking, work / "merges", self.inner)

    def say(self, note: str) -> None:
        """A note now, and in the report."""
        self.notes.append(note)
        self.progress.note(note)

    def report(self, began: float) -> TuneReport:
        """Search, compare, merge."""
        choices = self._merged(self.space.merges())
        for note in notes_on_space(self.space, choices):
            self.say(note)
        live, groups = open_live(self.merges, choices[0], self.space, self.settings, self.work, self.memory.held)
        evaluator = self._evaluator(live)
        names = sorted({g for g in groups.values() if g != FIXED}) if self.space.groups != "none" else []
        trials = self._search(choices, names, evaluator)
        least = self.settings.least_agreement
        chosen, allowed = choose(trials, least)
        finals = self._finals(chosen.candidate, evaluator)
        made = self.merges.recipe_of(chosen.candidate.merge, chosen.candidate.scale)
        final = final_recipe(made, self.given, chosen.candidate, groups, self.work, self.work / "statistics")
        self.progress.doing("merging the chosen one")
        (merged,) = run_recipes([final], self.run)
        report = TuneReport(
            out=Path(str(final.out)),
            recipe=final,
            chosen=chosen,
            trials=trials,
            front=pareto_front(trials),
            finals=finals,
            score=self.settings.score_name,
            refused=self.merges.refused,
            notes=[*self.notes, *notes_on_choice(finals, allowed=allowed, least_agreement=least)],
            seconds=time.perf_counter() - began,
            memory=self.memory,
            merged=merged,
        )
        report.save(self.work)
        write_tune(report, self.work / "tune.html")
        return report

    def _planned(self, recipe: Recipe, data: Mapping[str, Source]) -> MemoryPlan:
        """The memory plan, checked and told."""
        with open_checkpoint(self.base) as base:
            sizes = sizes_of(data, base.config or {}, self.settings.new_tokens)
            specs = dict(base.specs)
        merges = Merges(recipe, self.work / "merges", self.inner)
        plan = plan_memory(
            specs,
            sizes,
            self.run,
            dtype=self.settings.dtype,
            merging=merges.peak_bytes([MergeChoice("average"), MergeChoice(recipe.method, recipe.options)]),
            merges=len(self.space.merges()),
            gram="gram" in self.space.statistics,
        )
        plan.check()
        self.progress.planned(plan)
        if (why := plan.why_files) is not None:
            self.notes.append(why)
        return plan

    def _merged(self, choices: Sequence[MergeChoice]) -> list[MergeChoice]:
        made: list[MergeChoice] = []
        for start in range(0, len(choices), BATCH):
            batch = choices[start : start + BATCH]
            self.progress.doing(f"merging {', '.join(map(str, batch))}")
            made += self.merges.make(batch)
        if not made:
            raise RecipeError("None of the methods can merge these experts.", self.merges.refused.values())
        return made

    def _evaluator(self, live: LiveModel) -> Evaluator:
        def load(wanted: MergeChoice) -> Direction:
            self.merges.make([wanted])
            if wanted.key in self.merges.refused:
                raise RecipeError(f"{wanted} cannot be merged: {self.merges.refused[wanted.key]}")
            folder = self.merges.folder_of(wanted)
            return live.direction(folder.name, lambda: self.load(str(folder)).model)

        settings = self.settings
        inputs = {label: a.inputs for label, a in self.asked.items()}
        return Evaluator(
            live,
            load,
            self.asked,
            settings.score,
            self.work / "trials.jsonl",
            mark=mark_of(inputs, settings.score_name, settings.dtype, self.merges.mark),
            memory=self.memory.deltas,
        )

    def _search(self, choices: Sequence[MergeChoice], names: Sequence[str], evaluator: Evaluator) -> list[Trial]:
        best: dict[float, Trial] = {}

        def report(trial: Trial) -> None:
            if trial.share not in best or trial.mean < best[trial.share].mean:
                best[trial.share] = trial
            self.progress.trial(trial, best[trial.share])

        self.progress.doing("searching")
        samples = min(sum(b.samples for b in a.inputs.search) for a in self.asked.values())
        weighted = len(self.asked) if self.space.weights else 0
        around = Around(samples, names, weighted, self.settings.seed)
        return search(self.space, choices, evaluator, self.settings.budget, around, report)

    def _finals(self, chosen: Candidate, evaluator: Evaluator) -> list[Rival]:
        """The chosen merge, the average, the recipe's own method at its own scale, and the base, on unseen inputs."""
        self.progress.doing("comparing on inputs that were kept back")
        assert isinstance(self.given.scale, float), "checked by `tune_recipe`"
        own = MergeChoice(self.given.method, self.given.options)
        rivals = {f"{own} x {self.given.scale:g} (the recipe's)": Candidate(own, self.given.scale)}
        if self.settings.average:
            rivals = {"average": Candidate(MergeChoice("average"), 1.0), **rivals}
        found = {f"{chosen} (chosen)": evaluator.final(chosen)}
        made = {c.key for c in self.merges.make([c.merge for c in rivals.values()])}
        for name, candidate in rivals.items():
            if candidate.merge.key in made and candidate.key != chosen.key:
                found[name] = evaluator.final(candidate)
        found["base"] = evaluator.final(None)
        return compare_finally(found, self.settings.score, self.settings.seed)


def open_live(
    merges: Merges, choice: MergeChoice, space: Space, settings: TuneSettings, work: Path, held: str = "memory"
) -> tuple[LiveModel, dict[str, str]]:
    """The live model, and the group of every tensor.

    Args:
        choice: a merge that was made; its files say what a checkpoint of these models looks like.
        held: place of base and deltas, see `MemoryPlan`.
    """
    plan = merges.plan(choice)
    groups = groups_of(plan, scaled_names(plan, merges.plan(choice, scale=2.0)), space.groups)
    names = tuple(dict.fromkeys(groups.values()))
    load = load_with(settings, merges.base)
    numbered = number_checkpoint(work / "groups", plan.specs, groups, names, merges.folder_of(choice))
    numbers = group_numbers(state_of(load(str(numbered)).model))
    folder = work / "directions" if held == "files" else None
    return LiveModel(load(merges.base).model, names, numbers, folder), groups


def _base_of_adapters(recipe: Recipe) -> str:
    """The base that the adapters name.

    Raises:
        RecipeError: they name none, or several.
    """
    found = set()
    for expert in recipe.experts:
        if not is_adapter(expert.path):
            raise RecipeError(f"--base must be given: {expert.label} is no adapter.")
        with open_adapter(expert.path) as adapter:
            found.add(adapter.config.base_model or "")
    if len(found) != 1 or not next(iter(found)):
        raise RecipeError("The adapters do not name one base: give it with --base.")
    return next(iter(found))
