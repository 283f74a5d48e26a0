"""Answers kept: the answers of a merge beside each expert's own, on a few inputs of the expert's task.

For classes: the share of inputs with equal predictions. For texts: the share of tokens of the expert's own greedy
answer that the merge ranks first when it is led through that answer, in one pass. `whole` counts whole answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from actmat.diagnostics.model import AgreementRow
from actmat.errors import MergeError, RecipeError, StatisticsError, format_size
from actmat.experts.locate import fields_of, locate
from actmat.experts.lora.adapter import Adapter
from actmat.extras.collect.data import (
    MESSAGES,
    READERS,
    SAMPLES,
    SELF,
    TEXT_COLUMNS,
    DataOptions,
    Row,
    by_expert,
    class_names,
    class_prompts,
    is_contrastive,
    make_batches,
    prepare_data,
)
from actmat.extras.collect.outputs import recipe_of_output
from actmat.extras.models.loading import Loaded
from actmat.extras.tune.evaluate import AnswerComparison, Answers, compare_answers, keep_answers, own_right
from actmat.extras.tune.inputs import InputBatch, completed, is_causal, labeled_by_answers, of_similar_lengths
from actmat.extras.tune.live import Loader
from actmat.extras.tune.memory import model_device
from actmat.extras.tune.progress import TuneProgress
from actmat.extras.tune.written import MOST, check_written, write_own
from actmat.recipe import ExpertRef, Recipe
from actmat.run import plan_recipe, run_recipes
from actmat.run.locate import Held
from actmat.settings import RunSettings

FEWEST = 4
"""Inputs of an expert from which every fourth is held back for the comparison of answers."""
AVERAGE_BYTES = 2 << 30
"""Largest average of full models that is written, to compare its answers as well."""
LABELS, ANSWERS = ("label", "labels"), ("answer", "answers", "completion", "response")
"""Columns that are used if they are there: classes as numbers, and right continuations of texts."""
PROMPT = "text:"
"""Beginning of a prompt without a space."""
Z_95 = 1.959964


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """Settings of models that run on inputs.

    Args:
        reading: options of every data set, whose location is replaced.
        new_tokens: tokens of an expert's own answer to a text, at most.
        model_class, model_dtype: of the models while they run.
        keep_statistics: keep the folder `OUT.statistics`.
        template: around every text, {} is its place; or expert -> its own.
        as_adapter: merge adapters into an adapter where the recipe, with the base that they run on, writes a model.
        loaded: models in memory, by the places that recipes give them.
    """

    reading: DataOptions = field(default_factory=lambda: DataOptions("", max_samples=SAMPLES))
    new_tokens: int = 16
    model_class: str | None = None
    model_dtype: str = "float32"
    keep_statistics: bool = False
    template: str | Mapping[str, str] | None = None
    as_adapter: bool = True
    loaded: Mapping[str, Loaded] = field(default_factory=dict)

    def loader(self, base: str, device: str) -> Loader:
        """Loads the models."""
        return Loader(base, self.model_class, self.model_dtype, device, loaded=self.loaded)

    def source(self, given: Any, *, measured: bool) -> DataOptions:
        """A data set, or the inputs themselves; `samples` limits what is measured, not what is compared.

        Raises:
            RecipeError: inputs of an unknown form.
        """
        if isinstance(given, DataOptions):
            reading = given
        else:
            reading = self.reading if measured else dataclasses.replace(self.reading, max_samples=SAMPLES)
            reading = dataclasses.replace(reading, location=str(given))
        if isinstance(given, list | tuple):
            return dataclasses.replace(reading, location=f"{len(given)} inputs given", rows=tuple(map(_as_row, given)))
        file, _, column = reading.location.rpartition(":")
        if Path(file).suffix in READERS and column.isidentifier():
            return dataclasses.replace(reading, location=file, text_column=column)
        if not reading.rows and is_prompt(reading.location):
            rows = (_as_row(reading.location.removeprefix(PROMPT)),)
            return dataclasses.replace(reading, location="the prompt given", rows=rows)
        return reading

    def templates(self, recipe: Recipe) -> dict[str, str]:
        """Expert -> the template around its texts.

        Raises:
            RecipeError: a template without `{}`, or of an expert that the merge does not have.
        """
        templates = by_expert(recipe, self.template) if self.template else {}
        for label, template in templates.items():
            if "{}" not in template:
                raise RecipeError(f"The template of '{label}' needs {{}} in the place of the text; got {template!r}.")
        return templates


def is_prompt(text: str) -> bool:
    """True for a text itself, which has a space or begins with `text:`; False for the place of a data set.

    >>> is_prompt("What is 2 + 2?"), is_prompt("text:hello"), is_prompt("hello"), is_prompt("my data/math.jsonl")
    (True, True, False, False)
    """
    is_file = Path(text).suffix in (*READERS, ".npz") or text.startswith(("/", "./", "../", "~"))
    return text.startswith(PROMPT) or (len(text.split()) > 1 and not is_file and not os.path.exists(text))


def _as_row(given: Any) -> Row:
    """The row of a text, of a chat, or of columns.

    Raises:
        RecipeError: it is none of these.
    """
    if isinstance(given, str):
        return {TEXT_COLUMNS[0]: given}
    if isinstance(given, Mapping) or (isinstance(given, list) and all(isinstance(m, Mapping) for m in given)):
        return given if isinstance(given, Mapping) else {MESSAGES: given}
    raise RecipeError(f"An input is a {type(given).__name__}; expected a text, a chat (list of messages), or a row.")


@dataclass(frozen=True)
class DataRows:
    """A data set and its rows, which were read."""

    options: DataOptions
    rows: Sequence[Row]

    def part(self, held: bool) -> DataRows:
        """Every fourth row, which is held back; or the others."""
        kept = [row for n, row in enumerate(self.rows) if (n % FEWEST == FEWEST - 1) == held]
        return dataclasses.replace(self, rows=kept)


def read_sources(
    recipe: Recipe, data: Any, settings: InputSettings, config: Mapping[str, Any], *, measured: bool
) -> dict[str, DataRows]:
    """Expert -> its rows; images have classes by the names of their folders if the base compares images with texts.

    Raises:
        RecipeError: data of unknown experts, or of not every expert if the data is `measured`.
        StatisticsError: data that cannot be read.
    """
    named = {n: settings.source(d, measured=measured) for n, d in by_expert(recipe, data).items()}
    for label, template in settings.templates(recipe).items():
        if label in named:
            named[label] = dataclasses.replace(named[label], template=template)
    if measured:
        check_every_expert(recipe, named)
    options = {label: with_classes(label, source, config) for label, source in named.items()}
    rows = prepare_data({label: o for label, o in options.items() if o.location != SELF})
    for label, source in options.items():
        if source.location == SELF:
            options[label] = dataclasses.replace(source, max_samples=min(source.max_samples or MOST, MOST))
            rows[label] = [{}] * (options[label].max_samples or 0)  # which the expert is to write
    return {label: DataRows(o, rows[label]) for label, o in options.items()}


def read_written(
    recipe: Recipe, settings: InputSettings, device: str, progress: TuneProgress
) -> dict[str, tuple[Sequence[str], float]]:
    """Expert -> prompts that it writes, and by how many nats per token they are more probable than under the base."""
    loader = settings.loader(recipe.base, model_device(device)[0])
    options = {label: s.options for label, s in read_sources(recipe, SELF, settings, {}, measured=False).items()}
    prompts, gains = write_own(loader, progress, {e.label: e.path for e in recipe.experts}, options, recipe.seed)
    return {label: (prompts[label].texts, gain) for label, gain in gains.items()}


def check_every_expert(recipe: Recipe, data: Mapping[str, Any]) -> None:
    """Raise `RecipeError` for experts without data."""
    if missing := [label for label in recipe.labels if label not in data]:
        problems = [f"no data is given for '{m}'. Fix: --data {m}=INPUTS, a prompt or a file" for m in missing]
        raise RecipeError("Every expert needs inputs of its own.", problems)


def with_classes(label: str, source: DataOptions, config: Mapping[str, Any]) -> DataOptions:
    """The data with the classes of its images, by the names of their folders, if the base compares images with texts.

    Raises:
        RecipeError: images without classes, or classes for a model of another kind.
    """
    if not is_contrastive(config):
        if source.classes:
            raise RecipeError("classes need a model that compares images with texts, such as CLIP.")
        return source
    classes = source.classes or class_names(source.location)
    if not classes and Path(source.location).is_dir():
        raise RecipeError(
            f"The image classes of '{label}' are unknown: --set classes={label}=a,b,c, or give a folder of images with "
            "one subfolder per class."
        )
    return dataclasses.replace(source, classes=classes)


@dataclass(frozen=True)
class Question:
    """Inputs of one expert, with its own answers.

    Args:
        source: location of the data set.
        inputs: number of samples.
        measured: statistics were measured on them as well.
        batches, answers: texts are followed by the expert's own answers; right ones that these begin with are labels.
        graded, graded_answers: other right answers where these are known.
        right: the expert's accuracy.
    """

    source: str
    inputs: int
    measured: bool
    batches: Sequence[InputBatch]
    answers: Sequence[Answers]
    graded: Sequence[InputBatch] = ()
    graded_answers: Sequence[Answers] = ()
    right: float | None = None

    def compare(self, model: nn.Module) -> tuple[AnswerComparison, float | None]:
        """Comparison of a model's answers with the expert's, and its accuracy where labels are known."""
        found = compare_answers(model, self.batches, self.answers)
        both = found + compare_answers(model, self.graded, self.graded_answers)
        labeled = [right == n for right, n in zip(both.right, both.labeled, strict=True) if n]
        return found, sum(labeled) / len(labeled) if labeled else None


class Asking:
    """Runs experts on their inputs, one after the other.

    Args:
        loader: of the models.
        settings: how the data is read, and answered.
        progress: receives callbacks.
    """

    def __init__(self, loader: Loader, settings: InputSettings, progress: TuneProgress) -> None:
        self.loader, self.settings, self.progress = loader, settings, progress
        self.notes: list[str] = []  # some more than once
        self.questions: dict[str, Question] = {}

    def with_written(self, recipe: Recipe, sources: Mapping[str, DataRows]) -> dict[str, DataRows]:
        """The sources; prompts that experts are to write are written.

        Raises:
            StatisticsError: experts that do not write prompts of their tasks.
        """
        options = {label: s.options for label, s in sources.items() if s.options.location == SELF}
        if not options:
            return dict(sources)
        places = {e.label: e.path for e in recipe.experts if e.label in options}
        prompts, gains = write_own(self.loader, self.progress, places, options, recipe.seed)
        check_written(prompts, gains)
        many = ", ".join(f"'{label}' {len(written.texts)}" for label, written in prompts.items())
        self.notes.append(f"prompts that experts wrote themselves: {many}; 'actmat try --self' shows them")
        made = {label: DataRows(*p.inputs(options[label], recipe.seed)) for label, p in prompts.items()}
        return {**sources, **made}

    def batches(
        self, loaded: Loaded, data: DataRows, target: str | None = None, *, labels: bool = True
    ) -> list[InputBatch]:
        """The rows in batches of similar lengths, with class labels where there are any."""
        options = dataclasses.replace(data.options, batch_size=2 * data.options.batch_size)
        if target is not None:
            options = dataclasses.replace(options, target_column=target)
        elif options.label_column is None and labels:
            column = next((c for c in LABELS if type(data.rows[0].get(c)) is int), None)
            options = dataclasses.replace(options, label_column=column)
        rows = sorted(data.rows, key=lambda row: sum(len(str(v)) for v in row.values() if isinstance(v, str | list)))
        shared = class_prompts(loaded, options) if options.classes else {}
        known = labels and options.label_column is not None
        given = make_batches(loaded, options, rows=rows, labels=known, apart=True, note=self.notes.append)
        return [InputBatch({k: v for k, v in b.items() if k != "labels"}, None, b.get("labels"), shared) for b in given]

    def ask(self, label: str, loaded: Loaded, data: DataRows, *, measured: bool = False) -> None:
        """Keep an expert's answers to inputs, and to those with right answers."""
        given, graded = self.batches(loaded, data), list[InputBatch]()
        batches = self.completed(loaded, given, label)
        if (column := self._answer_column(loaded, data)) is not None:
            known = self.completed(loaded, self.batches(loaded, data, column), label)
            pairs = [labeled_by_answers(own, right) for own, right in zip(batches, known, strict=True)]
            batches, graded = [own for own, _ in pairs], [other for _, other in pairs]
        elif is_causal(loaded.model) or any(b.labels is None for b in given):  # no class labels, or targets
            batches = [dataclasses.replace(b, labels=None) for b in batches]
        parts = [of_similar_lengths(b, loaded.model) for b in (batches, graded)]
        own, others = ((b, keep_answers(loaded.model, b)) for b in parts)
        right = own_right([*own[0], *others[0]], [*own[1], *others[1]])
        self.questions[label] = Question(data.options.location, len(data.rows), measured, *own, *others, right)

    def _answer_column(self, loaded: Loaded, data: DataRows) -> str | None:
        """Column of right continuations, for a causal model whose data has them."""
        if not is_causal(loaded.model):
            return None
        row = data.rows[0]
        return data.options.target_column or next((c for c in ANSWERS if isinstance(row.get(c), str)), None)

    def completed(self, loaded: Loaded, batches: Sequence[InputBatch], label: str) -> list[InputBatch]:
        """Batches with the expert's own answers, or the given ones."""
        whole = []
        self.progress.doing(f"asking {label}", sum(b.samples for b in batches))
        for batch in batches:
            labels = {} if batch.labels is None else {"labels": batch.labels}
            done = completed(loaded, {**batch.arguments, **labels}, self.settings.new_tokens)
            whole.append(dataclasses.replace(done, shared=batch.shared))
            self.progress.done(sum(b.samples for b in whole))
        return whole

    def compare(self, place: str | Path, name: str) -> dict[str, tuple[AnswerComparison, float | None]]:
        """Comparison of the model at a place with every expert that was asked."""
        model = self.loader.load(str(place)).model
        self.progress.doing(f"running {name}", len(self.questions))
        found = {}
        for number, (label, question) in enumerate(self.questions.items(), 1):
            found[label] = question.compare(model)
            self.progress.done(number)
        return found

    def rows(
        self, places: Sequence[str | Path], recipe: Recipe, folder: Path, held: Held
    ) -> list[tuple[AgreementRow, ...]]:
        """Rows of each merge; the plain average of the recipe's experts is made in `folder`, and compared too."""
        if not self.questions:
            return [()] * len(places)
        average = self._of_average(recipe, folder, held)
        return [
            tuple(_row(n, self.questions[n], *f, average.get(n)) for n, f in self.compare(place, str(place)).items())
            for place in places
        ]

    def _of_average(self, recipe: Recipe, folder: Path, held: Held) -> dict[str, tuple[AnswerComparison, float | None]]:
        """Comparison of the plain average's answers; empty where it would be large, or cannot be made."""
        plain = average_of(recipe)
        with contextlib.suppress(MergeError), tempfile.TemporaryDirectory(prefix=".average.", dir=folder) as inside:
            average = plain.model_copy(update={"out": str(Path(inside) / "average")})
            if (size := plan_recipe(average, held=held).write_bytes) > AVERAGE_BYTES:
                self.progress.note(f"the average is not compared: it would take {format_size(size)} on the disk")
                return {}
            run_recipes([average], RunSettings(durable=False, held=held))
            return self.compare(str(average.out), "the average")
        return {}


def average_of(recipe: Recipe) -> Recipe:
    """The plain average of a recipe's experts, with nothing of its method."""
    plain = Recipe(experts=(ExpertRef(path="x"),))
    experts = tuple(e.model_copy(update={"weight": 1.0, "statistics": "", "options": {}}) for e in recipe.experts)
    names = ("rules", "post", "postprocess", "options", "scale", "space", "notes")
    fields = {n: getattr(plain, n) for n in names} | {"method": "average", "experts": experts}
    return recipe.model_copy(update=fields)


def _row(
    label: str,
    question: Question,
    found: AnswerComparison,
    accuracy: float | None,
    average: tuple[AnswerComparison, float | None] | None,
) -> AgreementRow:
    kept, inputs = _kept(found), question.inputs
    low, high = wilson_interval(kept, inputs)
    grades = () if accuracy is None else (accuracy, question.right, average[1] if average else None)
    return AgreementRow(
        expert=label,
        data=question.source,
        disagreement=1 - kept,
        divergence=math.fsum(found.divergence) / sum(found.predictions),
        predictions=sum(found.predictions),
        inputs=inputs,
        measured=question.measured,
        low=low,
        high=high,
        average=_kept(average[0]) if average else None,
        accuracy=grades,
        whole=sum(not d for d in found.differing) / inputs,
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


def measure_agreement(
    directory: str | Path,
    data: Any,
    settings: InputSettings,
    *,
    base: str | Path | None = None,
    device: str = "cpu",
    progress: TuneProgress,
) -> tuple[AgreementRow, ...]:
    """Rows of `actmat.agreement`."""
    place = Path(directory)
    recipe = recipe_of_output(place)
    config, _ = _looked_at(str(base or recipe.base or place))
    sources = read_sources(recipe, data, settings, config, measured=False)
    experts = {e.label: e.path for e in recipe.experts if e.label in sources}
    if base is not None and not any(needs for _, needs in map(_looked_at, (str(place), *experts.values()))):
        raise StatisticsError(f"A base goes with adapters; {place} and the experts compared are full models.")
    loader = settings.loader(str(base or recipe.base or ""), device)
    asking = Asking(loader, settings, progress)
    sources = asking.with_written(recipe, sources)
    for label, location in experts.items():
        try:
            asking.ask(label, asking.loader.load(location), sources[label])
        except StatisticsError as error:
            raise StatisticsError(f"Expert '{label}' cannot be compared with {place}.", error.problems) from None
    (rows,) = asking.rows([place], recipe, place.parent, {})
    return rows


def _looked_at(place: str) -> tuple[Mapping[str, Any], bool]:
    """Config of an input, and whether it needs a base."""
    with locate(place) as located:
        return fields_of(located), isinstance(located, Adapter)
