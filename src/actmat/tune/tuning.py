"""`tune`: find the best merge of some experts from a few unlabelled inputs of each."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.api.agreement import DataSource, data_of, prepare_data
from actmat.engine.memory import available_memory
from actmat.errors import OutputError, RecipeError
from actmat.experts.resolve import is_adapter, open_adapter
from actmat.methods import get_method
from actmat.recipe import ExpertRef, Recipe
from actmat.run import run_recipes
from actmat.settings import RunSettings
from actmat.statistics import collect
from actmat.statistics.data import DataOptions
from actmat.statistics.models import Loaded, load_model
from actmat.tune.answers import Predict, default_predict, keep_answers
from actmat.tune.evaluate import Asked, Evaluator, Score, Trial
from actmat.tune.groups import group_rules, groups_of, scaled_names
from actmat.tune.inputs import ExpertInputs, prepare_inputs
from actmat.tune.live import FIXED, Direction, LiveModel, group_numbers, state_of
from actmat.tune.merges import Merges, number_checkpoint
from actmat.tune.page import write_tune
from actmat.tune.report import TuneReport, compare_finally
from actmat.tune.search import Around, Budget, choose, pareto_front, search
from actmat.tune.space import Candidate, MergeChoice, Space

__all__ = ["TuneProgress", "TuneSettings", "tune_recipe"]

BATCH = 4
"""Methods that are merged in one reading of the inputs."""


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Settings of a search.

    Args:
        score: see `evaluate.Score`.
        budget: of the search; default: until every round is through.
        least_agreement: share of its own predictions that every expert must keep in the chosen merge.
        model_class, dtype, device: of the models while they run.
        new_tokens: tokens that a generating expert adds to an input.
        predict: logits of a model, for models that transformers does not load as they should be asked.
        load: from a location to a model, in place of `load_model`.
        seed: of the search and of the bootstrap.
        keep: keep the work folder with the merges that were tried.
    """

    score: Score = "divergence"
    budget: Budget = dataclasses.field(default_factory=Budget)
    least_agreement: float = 0.0
    model_class: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    new_tokens: int = 32
    predict: Predict = default_predict
    load: Callable[[str], Loaded] | None = None
    seed: int = 0
    keep: bool = False


class TuneProgress:
    """Callbacks of a search; does nothing."""

    def doing(self, what: str) -> None:
        """A stage begins."""

    def trial(self, found: Trial, best: Trial) -> None:
        """A candidate was tried; `best`: of those on as many inputs."""


def tune_recipe(
    recipe: Recipe,
    space: Space,
    data: Mapping[str, DataSource],
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
        data: expert -> its inputs, or one data set for all under every name.
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
    options = data_of(recipe, data)
    if missing := [label for label in recipe.labels if label not in options]:
        raise RecipeError("Every expert needs inputs of its own.", [f"no data is given for '{m}'" for m in missing])
    prepare_data(options)
    with _work_folder(Path(recipe.out), run, keep=settings.keep) as work:
        search_run = _Search(recipe, space, options, settings, run, progress, work)
        return search_run.report(began)


@contextlib.contextmanager
def _work_folder(out: Path, run: RunSettings, *, keep: bool) -> Any:
    """`OUT.tune`, of which the merges are removed at the end of a search that came to its end."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]) and not run.overwrite:
        raise OutputError(f"{out} exists. Choose another --out, or pass --overwrite.")
    work = out.with_name(f"{out.name}.tune")
    work.mkdir(parents=True, exist_ok=True)
    yield work
    if not keep:
        for name in ("merges", "statistics", "groups"):
            shutil.rmtree(work / name, ignore_errors=True)


class _Search:
    """The steps of one search."""

    def __init__(
        self,
        recipe: Recipe,
        space: Space,
        data: Mapping[str, DataOptions],
        settings: TuneSettings,
        run: RunSettings,
        progress: TuneProgress,
        work: Path,
    ) -> None:
        self.space, self.data, self.settings, self.run = space, data, settings, run
        self.progress, self.work = progress, work
        self.given = recipe
        self.base = recipe.base or _base_of_adapters(recipe)
        self.asked: dict[str, Asked] = {}
        self.recipe = self._ask(recipe.model_copy(update={"base": self.base, "to": "model", "out": None}))
        inner = dataclasses.replace(run, overwrite=False, diagnose=False, durable=False, sha256=False)
        self.merges = Merges(self.recipe, work / "merges", inner)

    def report(self, began: float) -> TuneReport:
        """Search, compare, merge."""
        choices = self._merged(self.space.merges())
        groups = self._groups(choices[0])
        evaluator = self._evaluator(choices[0], groups)
        names = sorted({g for g in groups.values() if g != FIXED}) if self.space.groups != "none" else []
        trials = self._search(choices, names, evaluator)
        chosen, allowed = choose(trials, self.settings.least_agreement)
        finals = self._finals(chosen.candidate, evaluator)
        final = self._final_recipe(chosen.candidate, groups)
        self.progress.doing("merging the chosen one")
        run_recipes([final], self.run)
        report = TuneReport(
            out=Path(str(final.out)),
            recipe=final,
            chosen=chosen,
            trials=trials,
            front=pareto_front(trials),
            finals=finals,
            score=self._score_name,
            refused=self.merges.refused,
            notes=self._notes(finals, allowed=allowed),
            seconds=time.perf_counter() - began,
        )
        report.save(self.work)
        write_tune(report, self.work / "tune.html")
        return report

    @property
    def _score_name(self) -> str:
        score = self.settings.score
        return getattr(score, "__name__", "score") if callable(score) else score

    def _ask(self, recipe: Recipe) -> Recipe:
        """Load each expert once: its inputs, its answers, and its statistics; the recipe with those."""
        experts = []
        for expert in recipe.experts:
            self.progress.doing(f"asking {expert.label}")
            loaded = self._load(expert.path)
            options = self.data[expert.label]
            labels = self.settings.score in ("accuracy", "perplexity")
            inputs = prepare_inputs(expert.label, loaded, options, new_tokens=self.settings.new_tokens, labels=labels)
            answers = [
                keep_answers(loaded.model, half, self.settings.predict) for half in (inputs.search, inputs.final)
            ]
            self.asked[expert.label] = Asked(inputs, *answers)
            statistics = expert.statistics or self._collected(expert, loaded, inputs)
            experts.append(ExpertRef.model_validate({**expert.model_dump(), "statistics": statistics}))
        return recipe.model_copy(update={"experts": tuple(experts)})

    def _collected(self, expert: ExpertRef, loaded: Loaded, inputs: ExpertInputs) -> str:
        """Statistics of an expert on the inputs of the search, if a method needs any."""
        kinds = self.space.statistics
        if not kinds:
            return ""
        out = self.work / "statistics" / expert.label
        if not out.exists():
            collect(
                loaded.model,
                [b.arguments for b in inputs.search],
                checkpoint=loaded.checkpoint,
                adapter=loaded.adapter,
                out=out,
                gram="gram" in kinds,
                fisher="fisher" in kinds,
                source=self.data[expert.label].location,
                details=self.data[expert.label].details(),
            )
        return str(out)

    def _load(self, location: str) -> Loaded:
        if self.settings.load is not None:
            return self.settings.load(location)
        return load_model(
            location,
            base=self.base if is_adapter(location) else None,
            model_class=self.settings.model_class,
            dtype=self.settings.dtype,
            device=self.settings.device,
        )

    def _merged(self, choices: Sequence[MergeChoice]) -> list[MergeChoice]:
        made: list[MergeChoice] = []
        for start in range(0, len(choices), BATCH):
            batch = choices[start : start + BATCH]
            self.progress.doing(f"merging {', '.join(map(str, batch))}")
            made += self.merges.make(batch)
        if not made:
            raise RecipeError("None of the methods can merge these experts.", self.merges.refused.values())
        return made

    def _groups(self, choice: MergeChoice) -> dict[str, str]:
        plan = self.merges.plan(choice)
        return groups_of(plan, scaled_names(plan, self.merges.plan(choice, scale=2.0)), self.space.groups)

    def _evaluator(self, choice: MergeChoice, groups: Mapping[str, str]) -> Evaluator:
        names = tuple(dict.fromkeys(groups.values()))
        files = self.merges.folder_of(choice)
        specs = self.merges.plan(choice).specs
        numbered = number_checkpoint(self.work / "groups", specs, groups, names, files)
        numbers = group_numbers(state_of(self._load(str(numbered)).model))
        live = LiveModel(self._load(self.base).model, names, numbers)

        def load(wanted: MergeChoice) -> Direction:
            self.merges.make([wanted])
            if wanted.key in self.merges.refused:
                raise RecipeError(f"{wanted} cannot be merged: {self.merges.refused[wanted.key]}")
            return live.direction_to(self._load(str(self.merges.folder_of(wanted))).model)

        return Evaluator(
            live,
            load,
            self.asked,
            self.settings.predict,
            self.settings.score,
            self.work / "trials.jsonl",
            memory=available_memory() // 3,
        )

    def _search(self, choices: Sequence[MergeChoice], names: Sequence[str], evaluator: Evaluator) -> list[Trial]:
        best: dict[float, Trial] = {}

        def report(trial: Trial) -> None:
            if trial.share not in best or trial.mean < best[trial.share].mean:
                best[trial.share] = trial
            self.progress.trial(trial, best[trial.share])

        self.progress.doing("searching")
        weighted = self.space.weights and all(get_method(c.method).is_weighted for c in choices)
        samples = min(sum(b.samples for b in a.inputs.search) for a in self.asked.values())
        return search(
            self.space,
            choices,
            evaluator,
            self.settings.budget,
            Around(samples, names, len(self.asked) if weighted else 0, self.settings.seed),
            report,
        )

    def _finals(self, chosen: Candidate, evaluator: Evaluator) -> Any:
        """The chosen merge, the average, the recipe's own method at its own scale, and the base, on unseen inputs."""
        self.progress.doing("comparing on inputs that were kept back")
        assert isinstance(self.given.scale, float), "checked by `tune`"
        asked = {"average": MergeChoice("average"), "recipe": MergeChoice(self.given.method, self.given.options)}
        rivals = {
            "average": Candidate(asked["average"], 1.0),
            f"{asked['recipe']} x {self.given.scale:g} (the recipe's)": Candidate(asked["recipe"], self.given.scale),
        }
        found = {f"{chosen} (chosen)": evaluator.final(chosen)}
        made = {c.key for c in self.merges.make(list(asked.values()))}
        for name, candidate in rivals.items():
            if candidate.merge.key in made and candidate.key != chosen.key:
                found[name] = evaluator.final(candidate)
        found["base"] = evaluator.final(None)
        return compare_finally(found, self.settings.score, self.settings.seed)

    def _final_recipe(self, chosen: Candidate, groups: Mapping[str, str]) -> Recipe:
        """The recipe that makes the chosen merge; needs data only if its method needs statistics."""
        recipe = self.merges.recipe_of(chosen.merge, chosen.scale)
        keep = get_method(chosen.merge.method).needs_statistics
        if keep:
            place = self.work / "kept-statistics"
            if not place.exists() and (self.work / "statistics").exists():
                shutil.copytree(self.work / "statistics", place)
        experts = tuple(
            ExpertRef.model_validate({**e.model_dump(), "statistics": _moved(e.statistics, self.work) if keep else ""})
            for e in recipe.experts
        )
        factors = {g: chosen.factor(g) for g in chosen.groups}
        rules = (*recipe.rules, *group_rules(groups, factors))
        fields = {"experts": experts, "rules": rules, "out": self.given.out, "to": self.given.to or recipe.to}
        return Recipe.model_validate({**recipe.model_dump(), **fields})

    def _notes(self, finals: Sequence[Any], *, allowed: bool) -> list[str]:
        notes = []
        for rival in finals[1:]:
            if rival.verdict != "worse" and rival.name != "base":
                notes.append(
                    f"On unseen inputs, the chosen merge is not distinguishable from {rival.name}."
                    if rival.verdict == "not told apart"
                    else f"On unseen inputs, {rival.name} is better than the chosen merge: there are too few inputs "
                    "to choose from so many candidates."
                )
        if not allowed:
            notes.append(
                f"No candidate keeps {self.settings.least_agreement:.0%} of every expert's predictions; the one whose "
                "worst expert keeps most was taken."
            )
        return notes


def _moved(statistics: str, work: Path) -> str:
    """Place of statistics after the search."""
    path = Path(statistics)
    return str(work / "kept-statistics" / path.name) if path.parent == work / "statistics" else statistics


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
