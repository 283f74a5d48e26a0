"""Merge by a few inputs of each expert: statistics are measured on them, answers compared on those held back."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actmat.checkpoints.writing.staging import disk_errors
from actmat.diagnostics.model import AgreementRow, write_diagnosis
from actmat.errors import MergeError, OutputError, StatisticsError, format_size
from actmat.extras.collect.collect import collect
from actmat.extras.collect.data import READERS, SAMPLES, DataOptions, first_row
from actmat.extras.models.loading import Loaded, can_switch, switched
from actmat.extras.pages.html import write_html
from actmat.extras.tune.asking import takes_columns
from actmat.extras.tune.evaluate import AnswerComparison, Answers, compare_answers, default_predict, keep_answers
from actmat.extras.tune.inputs import InputBatch, batches_of, completed, cut_at, is_causal
from actmat.extras.tune.live import Loader
from actmat.extras.tune.memory import model_device
from actmat.extras.tune.settings import TuneProgress
from actmat.extras.tune.tuning import sources_of
from actmat.methods import get_method
from actmat.recipe import ExpertRef, Recipe
from actmat.recipe.output import AdapterOutput, ModelOutput
from actmat.report.manifest import write_manifest
from actmat.run import MergeReport, plan_recipe, run_recipes
from actmat.run.automatic import AUTO
from actmat.run.locate import Given, located
from actmat.settings import RunSettings

FEWEST = 4
"""Inputs of an expert from which every fourth is held back for the comparison of answers."""
AVERAGE_BYTES = 2 << 30
"""Largest average of full models that is written, to compare its answers as well."""
LABELS, ANSWERS = ("label", "labels"), ("answer", "answers", "completion", "response")
"""Columns that are used if they are there: classes as numbers, and right continuations of texts."""
Z_95 = 1.959964


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """Settings of models that run on inputs.

    Args:
        reading: options of every data set, whose location is replaced.
        new_tokens: tokens of an expert's own answer to a text, at most.
        model_class, dtype: of the models while they run.
        keep_statistics: keep the folder `OUT.statistics`.
        as_adapter: merge adapters into an adapter where the recipe, with the base that they run on, writes a model.
    """

    reading: DataOptions = field(default_factory=lambda: DataOptions("", max_samples=SAMPLES))
    new_tokens: int = 32
    model_class: str | None = None
    dtype: str = "float32"
    keep_statistics: bool = False
    as_adapter: bool = True

    def source(self, given: str, *, measured: bool) -> DataOptions:
        """A data set, or the text itself; `samples` limits what is measured, not what answers are compared on."""
        reading = self.reading if measured else dataclasses.replace(self.reading, max_samples=SAMPLES)
        if is_prompt(given):
            return dataclasses.replace(reading, location="the prompt given", texts=(given,))
        return dataclasses.replace(reading, location=given)


@dataclass(frozen=True)
class Question:
    """Inputs of one expert, with its own answers.

    Args:
        source: the data set.
        inputs: number of samples.
        measured: statistics were measured on them as well.
        batches, answers: texts are followed by the expert's own answers.
        graded, right: batches with right answers where these are known, and the expert's accuracy.
    """

    source: DataOptions
    inputs: int
    measured: bool
    batches: tuple[InputBatch, ...]
    answers: Sequence[Answers]
    graded: tuple[InputBatch, ...] = ()
    graded_answers: Sequence[Answers] = ()
    right: float | None = None

    def compare(self, model: Any) -> tuple[AnswerComparison, float | None]:
        """Comparison of a model's answers with the expert's, and its accuracy where labels are known."""
        found = compare_answers(model, self.batches, self.answers, default_predict)
        return found, _accuracy(model, self.graded, self.graded_answers)


class Models:
    """Loads one model after the other; adapters of one base are switched on it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._loaded: Loaded | None = None

    def load(self, place: str) -> Loaded:
        """The model at a place; the one before it cannot be used any more."""
        before, self._loaded = self._loaded, None
        can = can_switch(place)
        found = switched(before, place) if before is not None and can else None
        del before  # a full model is freed before the next one is loaded
        found = found or self._loader.load(place)
        self._loaded = found if can else None
        return found


def is_prompt(text: str) -> bool:
    """True for a text itself, False for the place of a data set.

    >>> is_prompt("Question: What is 2 + 2?"), is_prompt("math.jsonl"), is_prompt("my data/math.jsonl")
    (True, False, False)
    """
    is_file = Path(text).suffix in (*READERS, ".npz") or text.startswith(("/", "./", "../", "~"))
    return any(c.isspace() for c in text) and not is_file and not os.path.exists(text)


def merge_with_inputs(
    recipes: Sequence[Recipe],
    data: Mapping[str, str],
    check: Mapping[str, str],
    settings: InputSettings,
    run: RunSettings,
    progress: TuneProgress,
) -> list[MergeReport]:
    """Merge recipes by inputs of their experts, and compare the answers of each merge with the experts'.

    Of `data`, every fourth input of an expert is held back for the comparison, where there are at least `FEWEST`; the
    others are measured, if a method uses statistics. `auto` takes `regmean` then.

    Args:
        recipes: of one run, see `run_recipes`.
        data: expert -> inputs of its task: a data set, or one text.
        check: expert -> inputs that are only compared on, in place of those held back.
        settings: of the models.
        run: of the merges.
        progress: receives callbacks.

    Returns:
        Reports of the merges, with answers.

    Raises:
        RecipeError, StatisticsError, OutputError: inputs, data or output that cannot be used.
    """
    outs = [str(r.out) for r in recipes]
    if wrong := [out for out in outs if "://" in out or out.endswith(".safetensors")]:
        raise OutputError(f"{wrong[0]} is not a local folder: a merge with inputs is loaded and run from its folder")
    with located(recipes[0]) as given:
        adapters = settings.as_adapter and given.only_adapters and given.have_factors
        kinds = _kinds(recipes, given) if data else frozenset()
        both = ((data, True), (check, False))
        sources = [_sources(recipes[0], given, settings, some, measured=m) for some, m in both]
    loader = Loader(recipes[0].base, settings.model_class, settings.dtype, model_device(run.device)[0])
    asking, folder = _Asking(Models(loader), settings, kinds, progress), Path(f"{outs[0]}.statistics")
    removed = not (settings.keep_statistics or folder.exists())
    try:
        given_data, checked = sources
        experts = [asking.expert(e, given_data.get(e.label), checked.get(e.label), folder) for e in recipes[0].experts]
        notes = tuple(asking.notes)
        if kinds and removed:
            notes += (
                "statistics of these inputs are removed after the merge; --set keep_statistics=true keeps them, to "
                "merge again from the recipe",
            )
        ready = [_ready(r, experts, notes, as_adapter=adapters) for r in recipes]
        progress.doing("merging")
        reports = run_recipes(ready, run, draw=write_html)
        return [
            _finished(r, rows, removed=removed)
            for r, rows in zip(reports, _rows(reports, ready[0], asking), strict=True)
        ]
    finally:
        if removed:
            shutil.rmtree(folder, ignore_errors=True)


def _sources(recipe: Recipe, given: Given, settings: InputSettings, some: Mapping[str, str], *, measured: bool) -> Any:
    """Data sets by expert; empty where none are given."""
    named = {name: settings.source(text, measured=measured) for name, text in some.items()}
    return sources_of(recipe, named, given.config, whole=measured) if named else {}


def _kinds(recipes: Sequence[Recipe], given: Given) -> frozenset[str]:
    """Kinds of statistics that the merges use."""
    found: set[str] = set()
    for recipe in recipes:
        if recipe.method != AUTO:
            found.update(get_method(recipe.method).needs_statistics)
        elif len(recipe.experts) > 1 and (recipe.base or given.only_adapters):
            found.add("gram")
    return frozenset(found)


def _ready(recipe: Recipe, experts: Sequence[ExpertRef], notes: tuple[str, ...], *, as_adapter: bool) -> Recipe:
    """The recipe with statistics and notes; adapters become an adapter, also if the base that they run on is given."""
    given = {e.label: e.statistics for e in experts}
    own = [{**e.model_dump(), "statistics": given[e.label]} for e in recipe.experts]
    fields: dict[str, Any] = {"experts": tuple(map(ExpertRef.model_validate, own)), "notes": (*recipe.notes, *notes)}
    if as_adapter and recipe.output == ModelOutput():
        fields["output"] = AdapterOutput()
        fields["notes"] += ("adapters are merged into an adapter; --to model writes a full model of the base",)
    return recipe.model_copy(update=fields)


class _Asking:
    """Runs experts on their inputs, one after the other."""

    def __init__(self, models: Models, settings: InputSettings, kinds: frozenset[str], progress: TuneProgress) -> None:
        self.models, self._settings, self._kinds, self.progress = models, settings, kinds, progress
        self.notes: list[str] = []
        self.questions: dict[str, Question] = {}

    def expert(self, expert: ExpertRef, data: Any, check: Any, folder: Path) -> ExpertRef:
        """The expert with statistics on its data; its answers are kept.

        Args:
            data, check: its data sets, or None.
            folder: for statistics.
        """
        if data is None and check is None:
            return expert
        self.progress.doing(f"running {expert.label}")
        loaded, statistics = self.models.load(expert.path), expert.statistics
        given = [] if data is None else self._read(loaded, data)
        total = sum(b.samples for b in given)
        holds = data is not None and check is None and total >= FEWEST
        measured = _part(given, False if holds else None)
        measures = bool(self._kinds and measured and not statistics)
        if measures:
            statistics = str(folder / expert.label)
            self._collect(loaded, measured, data, Path(statistics))
        source, held = check or data, holds or None
        asked = given if check is None else self._read(loaded, check)
        asked = _part(asked, held)
        self._note(expert.label, total * measures, sum(b.samples for b in asked), own=check is not None, holds=holds)
        try:
            graded = _part(self._with_answers(loaded, source), held)
            self.questions[expert.label] = self._ask(loaded, source, asked, graded)
        except StatisticsError as error:
            if check is not None:
                raise
            self.notes.append(f"answers of '{expert.label}' are not compared: {error.problems[0]}")
        if measures and not holds and check is None and (asked_there := self.questions.get(expert.label)):
            self.questions[expert.label] = dataclasses.replace(asked_there, measured=True)
        return ExpertRef.model_validate({**expert.model_dump(), "statistics": statistics})

    def _note(self, label: str, measured: int, asked: int, *, own: bool, holds: bool) -> None:
        taken = measured - asked * holds if measured else 0
        what = "of --check" if own else "held back" if holds else "the same" if measured else "given"
        self.notes.append(f"inputs of '{label}': {taken} measured; answers compared on {asked} ({what})")

    def _read(self, loaded: Loaded, source: DataOptions) -> list[InputBatch]:
        """Batches of a data set, with class labels where there are any."""
        if source.label_column is None and not source.texts:
            row = first_row(source)
            column = next((c for c in LABELS if type(row.get(c)) is int), None)
            source = dataclasses.replace(source, label_column=column)
        found, shared, _ = batches_of(loaded, source, self.notes.append, labels=True)
        return [
            InputBatch({k: v for k, v in b.items() if k != "labels"}, None, b.get("labels"), shared=shared)
            for b in found
        ]

    def _collect(self, loaded: Loaded, batches: Sequence[InputBatch], source: DataOptions, out: Path) -> None:
        """Statistics on inputs, of an encoder-decoder model with its own answers."""
        if getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False):
            batches = [completed(loaded, b.arguments, self._settings.new_tokens) for b in batches]
        collect(
            loaded.model,
            [b.keywords for b in batches],
            checkpoint=loaded.checkpoint,
            adapter=loaded.adapter,
            out=out,
            overwrite=True,
            gram="gram" in self._kinds,
            fisher="fisher" in self._kinds,
            source=source.location,
            details=source.details(),
        )

    def _with_answers(self, loaded: Loaded, source: DataOptions) -> list[InputBatch]:
        """Texts followed by the right answers, for a causal model whose data has them."""
        if source.texts or not is_causal(loaded.model):
            return []
        row = first_row(source)
        column = source.target_column or next((c for c in ANSWERS if isinstance(row.get(c), str)), None)
        return [] if column is None else self._read(loaded, dataclasses.replace(source, target_column=column))

    def _ask(
        self, loaded: Loaded, source: DataOptions, batches: Sequence[InputBatch], graded: Sequence[InputBatch]
    ) -> Question:
        """An expert's answers to inputs, and to those with right answers."""
        ready, right = (self._completed(loaded, some) for some in (batches, graded))
        if not graded and not is_causal(loaded.model) and all(b.labels is not None for b in batches):
            right = ready  # class labels
        answers, theirs = (keep_answers(loaded.model, some, default_predict) for some in (ready, right))
        accuracy = _accuracy(loaded.model, right, theirs)
        samples = sum(b.samples for b in batches)
        return Question(source, samples, False, ready, answers, right, theirs, accuracy)

    def _completed(self, loaded: Loaded, batches: Sequence[InputBatch]) -> tuple[InputBatch, ...]:
        """Batches with the expert's own answers, or the given ones; samples are numbered, with little padding."""
        first, whole = 0, []
        for batch in batches:
            labels = {} if batch.labels is None else {"labels": batch.labels}
            done = completed(loaded, {**batch.arguments, **labels}, self._settings.new_tokens)
            whole.append(dataclasses.replace(done, shared=batch.shared, first=first))
            first += batch.samples
        ready = cut_at(whole)
        return tuple(b.with_few_logits() for b in ready) if takes_columns(loaded.model) else ready


def _part(batches: Sequence[InputBatch], held: bool | None) -> list[InputBatch]:
    """Every fourth sample of all, which is held back; or the others; None: all."""
    first, out = 0, []
    for batch in batches:
        index = [n for n in range(batch.samples) if held is None or ((first + n) % FEWEST == FEWEST - 1) == held]
        first += batch.samples
        out += [batch.rows(index, 0)] if index else []
    return out


def _accuracy(model: Any, batches: Sequence[InputBatch], answers: Sequence[Answers]) -> float | None:
    """Share of samples of which every labeled prediction is right; None without labels."""
    if not batches:
        return None
    found = compare_answers(model, batches, answers, default_predict)
    return sum(map(int.__eq__, found.right, found.labeled)) / len(found.labeled)


def _rows(reports: Sequence[MergeReport], recipe: Recipe, asking: _Asking) -> list[tuple[AgreementRow, ...]]:
    """Comparison of each merge with the experts, and with the average."""
    if not asking.questions:
        return [()] * len(reports)
    out = []
    asking.progress.doing("running the average")
    average = _of_average(recipe, asking)
    for report in reports:
        asking.progress.doing(f"running {report.out}")
        model = asking.models.load(str(report.out)).model
        found = {n: q.compare(model) for n, q in asking.questions.items()}
        out.append(tuple(_row(n, q, *found[n], average.get(n)) for n, q in asking.questions.items()))
    return out


def _of_average(recipe: Recipe, asking: _Asking) -> dict[str, tuple[AnswerComparison, float | None]]:
    """Comparison of the plain average's answers; empty where it would be large, or cannot be made."""
    plain = Recipe(experts=(ExpertRef(path="x"),))
    experts = tuple(e.model_copy(update={"weight": 1.0, "statistics": "", "options": {}}) for e in recipe.experts)
    names = ("rules", "post", "postprocess", "options", "scale", "space", "notes")
    fields = {n: getattr(plain, n) for n in names} | {"method": "average", "experts": experts}
    out = Path(str(recipe.out))
    with contextlib.suppress(MergeError), tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        average = recipe.model_copy(update=fields | {"out": str(Path(folder) / "average")})
        size = plan_recipe(average).write_bytes
        if size > AVERAGE_BYTES:
            asking.progress.note(f"the average is not compared: it would take {format_size(size)} on the disk")
            return {}
        run_recipes([average], RunSettings(durable=False))
        model = asking.models.load(str(average.out)).model
        return {n: q.compare(model) for n, q in asking.questions.items()}
    return {}


def _row(
    label: str,
    question: Question,
    found: AnswerComparison,
    accuracy: float | None,
    average: tuple[AnswerComparison, float | None] | None,
) -> AgreementRow:
    low, high = wilson_interval(_kept(found), question.inputs)
    grades = () if accuracy is None else (accuracy, question.right, average[1] if average else None)
    return AgreementRow(
        expert=label,
        data=question.source.location,
        disagreement=1 - _kept(found),
        divergence=math.fsum(found.divergence) / sum(found.predictions),
        predictions=sum(found.predictions),
        inputs=question.inputs,
        measured=question.measured,
        low=low,
        high=high,
        average=_kept(average[0]) if average else None,
        accuracy=grades,
    )


def _kept(found: AnswerComparison) -> float:
    """Share of predictions that are the expert's."""
    return 1 - sum(found.differing) / sum(found.predictions)


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of `n` independent inputs (E. B. Wilson, JASA 1927).

    >>> [round(x, 2) for x in wilson_interval(0.75, 16)]
    [0.51, 0.9]
    """
    middle, square = (share + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n), share * (1 - share) / n + (Z_95 / (2 * n)) ** 2
    half = Z_95 * math.sqrt(square) / (1 + Z_95**2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def _finished(report: MergeReport, rows: tuple[AgreementRow, ...], *, removed: bool) -> MergeReport:
    """The report with answers, also in `report.json` and its page; the manifest marks removed statistics."""
    folder, manifest = Path(report.out), dict(report.manifest)
    diagnosis = None if report.diagnosis is None else dataclasses.replace(report.diagnosis, agreement=rows or None)
    with disk_errors(folder):
        if diagnosis is not None:
            write_diagnosis(diagnosis, folder)
            write_html(diagnosis, folder / "report.html")
        manifest["statistics"] = [{**row, "removed": removed} for row in manifest.get("statistics", ())]
        write_manifest(folder, manifest)
    return dataclasses.replace(report, answers=rows, diagnosis=diagnosis)
