"""Answers kept: the answers of a merge, compared with each expert's own on a few inputs of the expert's task.

For classes: equal predictions. For texts: the merge ranks every token of the expert's own greedy answer first, with the
end, when it is led through that answer in one pass; so it would write the same. Of an answer that the expert does not
end in time, the first tokens are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from actmat.diagnostics.answers import FEW
from actmat.diagnostics.model import AgreementRow, RivalAnswers
from actmat.errors import MergeError, StatisticsError, format_size
from actmat.experts.locate import fields_of, locate
from actmat.experts.lora.adapter import Adapter
from actmat.extras.collect.binding import Binding
from actmat.extras.collect.collect import bound, measured
from actmat.extras.collect.data import SELF, Row, class_prompts, make_batches
from actmat.extras.collect.measures import Measurement, Settings
from actmat.extras.collect.outputs import recipe_of_output
from actmat.extras.models.loading import Loaded
from actmat.extras.tune.evaluate import AnswerComparison, Answers, compare_answers, keep_answers, own_right
from actmat.extras.tune.inputs import (
    COLUMNS,
    InputBatch,
    completed,
    cut_unended,
    is_causal,
    labeled_by_answers,
    of_similar_lengths,
    takes_columns,
)
from actmat.extras.tune.live import Loader
from actmat.extras.tune.sources import DataRows, InputSettings, read_sources
from actmat.extras.tune.written import check_written, write_own
from actmat.progress import Progress
from actmat.recipe import ExpertRef, Recipe
from actmat.run import plan_recipe, run_recipes
from actmat.run.automatic import AUTO
from actmat.run.locate import Held
from actmat.settings import RunSettings

FEWEST = 4
"""Inputs of an expert from which every fourth is held back where a merge is dear."""
ASKED = 32
"""Inputs of an expert that judge merges of folds, at most: an answer costs more than a measurement. From as many on
there are two folds: merges by 16 and by 64 inputs were within a point of each other (docs/inputs.md)."""
SHORT = 512
"""Characters of texts of which twice as many are answered at once: the cost is that of the tokens written."""
SMALL_BYTES = 2 << 30
"""Largest merge, and statistics of an expert, of which others are made and removed, to compare answers."""
LABELS, ANSWERS = ("label", "labels"), ("answer", "answers", "completion", "response")
"""Columns that are used if they are there: classes as numbers, and right continuations of texts."""
Z_95 = 1.959964

Samples = DataRows | Sequence[InputBatch]
"""Inputs as they were read, or in batches."""


def read_written(
    recipe: Recipe, settings: InputSettings, run: RunSettings, progress: Progress
) -> dict[str, tuple[Sequence[str], float]]:
    """Expert -> prompts that it writes, and by how many nats per token they are more probable than under the base."""
    loader = settings.loader(recipe.base, run)
    options = {label: s.options for label, s in read_sources(recipe, SELF, settings, {}, measured=False).items()}
    prompts, gains = write_own(loader, progress, {e.label: e.path for e in recipe.experts}, options, recipe.seed)
    return {label: (prompts[label].texts, gain) for label, gain in gains.items()}


@dataclass(frozen=True)
class Compared:
    """Comparison of a merge with one expert: on the expert's own answers, and on right answers where they differ."""

    own: AnswerComparison = field(default_factory=AnswerComparison)
    graded: AnswerComparison = field(default_factory=AnswerComparison)

    def __add__(self, other: Compared) -> Compared:
        """The inputs of both."""
        return Compared(self.own + other.own, self.graded + other.graded)

    @property
    def kept(self) -> list[bool]:
        """For each input, whether all predictions are the expert's."""
        return [not differing for differing in self.own.differing]

    @property
    def accuracy(self) -> float | None:
        """Share of inputs with labels of which all are right; None without labels."""
        both = self.own + self.graded
        right = [right == n for right, n in zip(both.right, both.labeled, strict=True) if n]
        return sum(right) / len(right) if right else None


@dataclass(frozen=True)
class Fold:
    """Inputs of one expert that judge the same merge.

    Args:
        batches, answers: texts are followed by the expert's own answers; right ones that these begin with are labels.
        graded, graded_answers: other right answers where these are known.
    """

    batches: Sequence[InputBatch]
    answers: Sequence[Answers]
    graded: Sequence[InputBatch]
    graded_answers: Sequence[Answers]

    def compare(self, model: nn.Module) -> Compared:
        """Comparison of a model's answers with the expert's."""
        pairs = ((self.batches, self.answers), (self.graded, self.graded_answers))
        return Compared(*(compare_answers(model, batches, answers) for batches, answers in pairs))


@dataclass(frozen=True)
class Question:
    """Inputs of one expert, with its own answers.

    Args:
        source: location of the data set.
        inputs: number of samples.
        measured: the merge that they judge has seen them.
        folds: each judges a merge of its own where there are several.
        unended: answers that the expert did not end.
        right: the expert's accuracy.
    """

    source: str
    inputs: int
    measured: bool
    folds: Sequence[Fold]
    unended: int
    right: float | None


class Asking:
    """Runs experts on their inputs, one after the other.

    Args:
        loader: of the models.
        settings: how the data is read, and answered.
        progress: receives callbacks.
    """

    def __init__(self, loader: Loader, settings: InputSettings, progress: Progress) -> None:
        self.loader, self.settings, self.progress = loader, settings, progress
        self.notes: list[str] = []  # some more than once
        self.questions: dict[str, Question] = {}  # judge the merge itself
        self.dealt: dict[str, Question] = {}  # each fold judges a merge that has not seen it

    def load(self, location: str) -> Loaded:
        """The model at a location, with a note if it runs layer by layer."""
        loaded = self.loader.load(location)
        if loaded.note and loaded.note not in self.notes:
            self.notes.append(loaded.note)
            self.progress.note(loaded.note)
        return loaded

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
        rows = sorted(data.rows, key=_length)
        size = data.options.batch_size * (4 if is_causal(loaded.model) and _length(rows[-1]) <= SHORT else 2)
        options = dataclasses.replace(data.options, batch_size=size)
        if target is not None:
            options = dataclasses.replace(options, target_column=target)
        elif options.label_column is None and labels:
            column = next((c for c in LABELS if type(data.rows[0].get(c)) is int), None)
            options = dataclasses.replace(options, label_column=column)
        shared = class_prompts(loaded, options) if options.classes else {}
        has_labels = labels and options.label_column is not None
        made = make_batches(loaded, options, rows=rows, labels=has_labels, apart=True, note=self.notes.append)
        return [InputBatch({k: v for k, v in b.items() if k != "labels"}, None, b.get("labels"), shared) for b in made]

    def measure(
        self, label: str, loaded: Loaded, data: Samples, kinds: Collection[str], out: Path, only: Collection[str] = ()
    ) -> None:
        """Write statistics of an expert on inputs; a base whose adapters are switched is compared with its files once.

        Args:
            only: weights in the files of the model; empty: all.
        """
        about: dict[str, Any] = {}
        if isinstance(data, DataRows):
            about = {"source": data.options.location, "details": data.options.details()}
            data = self.batches(loaded, data)
            if getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False):  # with its own answers
                data = [completed(loaded, batch.arguments, self.settings.new_tokens) for batch in data]
        self.progress.doing(f"measuring {label}", sum(batch.samples for batch in data))
        on_base = loaded is self.loader.on_base
        same = self.loader.binding if on_base else None
        with bound(loaded.model, loaded.checkpoint, loaded.adapter, same) as binding:
            self.loader.binding = binding if on_base else None
            located = binding.located.items()
            weights = [name for name, stored in located if any(piece.name in only for piece in stored.slices)]
            settings = Settings(gram="gram" in kinds, fisher="fisher" in kinds, only=weights or None, **about)
            few: dict[str, Any] = {} if _needs_logits(loaded.model, binding, settings) else {COLUMNS: 1}
            measured(
                Measurement(loaded.model, binding, settings),
                [{**batch.keywords, **few} for batch in data],
                lambda samples, tokens: self.progress.done(samples),
            ).save(out, overwrite=True)

    def ask(
        self, label: str, loaded: Loaded, data: DataRows, *, folds: Sequence[int] = (), measured: bool = False
    ) -> None:
        """Keep an expert's answers to inputs, and to those with right answers.

        Args:
            folds: number of the fold of each row; empty: all are in one.
            measured: the merge that they judge has seen them.
        """
        model = loaded.model
        folds = folds or [0] * len(data.rows)
        prompts, unended = self.batches(loaded, data), 0
        batches = self.completed(loaded, prompts, label)
        for n, batch in enumerate(batches if self.settings.new_tokens else ()):
            if batch.labels is not None and (is_causal(model) or prompts[n].labels is None):  # its own words
                batches[n], cut = cut_unended(batch, model)
                unended += sum(cut)
        column, answered = self._answer_column(loaded, data), list[InputBatch]()
        if column is not None:
            answered = self.completed(loaded, self.batches(loaded, data, column), label)
        elif is_causal(model) or any(b.labels is None for b in prompts):  # no class labels, or targets
            batches = [dataclasses.replace(b, labels=None) for b in batches]
        both = (split_folds(some, data.rows, folds) for some in (batches, answered))
        parts = [_fold(model, asked_batches, right) for asked_batches, right in zip(*both, strict=True)]
        asked_batches, answers = ([x for p in parts for x in getattr(p, name)] for name in ("batches", "answers"))
        asked_batches += [b for p in parts for b in p.graded]
        right = own_right(asked_batches, [*answers, *(a for p in parts for a in p.graded_answers)])
        asked = self.dealt if len(parts) > 1 else self.questions
        asked[label] = Question(data.options.location, len(data.rows), measured, parts, unended, right)

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

    def compare(
        self, place: str | Path, name: str, questions: Mapping[str, Question], fold: int | None = None
    ) -> dict[str, Compared]:
        """Comparison of the model at a place with experts that were asked, on one fold of their inputs or on all."""
        if not questions:
            return {}
        model = self.load(str(place)).model
        self.progress.doing(f"running {name}", len(questions))
        compared = {}
        for number, (label, question) in enumerate(questions.items(), 1):
            folds = question.folds if fold is None else question.folds[fold : fold + 1]
            compared[label] = sum((part.compare(model) for part in folds), Compared())
            self.progress.done(number)
        return compared

    @property
    def asked(self) -> dict[str, Question]:
        """The question that judges each expert's answers."""
        return {**self.dealt, **self.questions}

    def rows(
        self, merges: Sequence[tuple[Recipe, Mapping[str, Compared]]], rivals: Mapping[str, RivalMerge]
    ) -> list[tuple[AgreementRow, ...]]:
        """Rows of each merge of the same experts, with its recipe."""
        rows = []
        for recipe, compared in merges:
            others = {name: rival for name, (choice, rival) in rivals.items() if choice != choice_of(recipe)}
            rows.append(
                tuple(
                    _row(label, self.asked[label], compared[label], {n: rival[label] for n, rival in others.items()})
                    for label in recipe.labels
                    if label in self.asked
                )
            )
        return rows

    def rivals(self, recipe: Recipe, folder: Path, held: Held) -> dict[str, RivalMerge]:
        """The merge that `auto` makes without inputs, and the plain average, made in `folder` and compared.

        One is missing where it would be large, or cannot be made.
        """
        rivals: dict[str, RivalMerge] = {}
        for name, method in (("without", AUTO), ("average", "average")) if self.asked else ():
            with contextlib.suppress(MergeError), tempfile.TemporaryDirectory(prefix=".rival.", dir=folder) as inside:
                rival = plain_merge(recipe, method).model_copy(update={"out": str(Path(inside) / name)})
                plan = plan_recipe(rival, held=held)
                compared = next((c for choice, c in rivals.values() if choice == choice_of(plan.recipe)), None)
                if compared is None and plan.write_bytes > SMALL_BYTES:
                    size = format_size(plan.write_bytes)
                    self.progress.note(f"{plan.recipe.method} is not compared: it would take {size} on the disk")
                    continue
                if compared is None:
                    run_recipes([rival], RunSettings(durable=False, held=held))
                    compared = self.compare(str(rival.out), plan.recipe.method, self.asked)
                rivals[name] = (choice_of(plan.recipe), compared)
        return rivals


Choice = tuple[str, Mapping[str, Any], str]
"""Method, options and space."""
RivalMerge = tuple[Choice, dict[str, Compared]]
"""Another merge of the same experts, and its comparison with each."""


def choice_of(recipe: Recipe) -> Choice:
    """The choice that distinguishes merges of the same experts."""
    return recipe.method, dict(recipe.options), recipe.space


def plain_merge(recipe: Recipe, method: str) -> Recipe:
    """A recipe's experts merged by a method, with nothing of its own method."""
    plain = Recipe(experts=(ExpertRef(path="x"),))
    left = {"weight", "statistics", "options"}
    experts = tuple(ExpertRef.model_validate(e.model_dump(exclude=left, exclude_unset=True)) for e in recipe.experts)
    names = ("rules", "post", "options", "scale", "space", "notes")
    fields = {n: getattr(plain, n) for n in names} | {"method": method, "experts": experts}
    return recipe.model_copy(update=fields)


def _needs_logits(model: Any, binding: Binding, settings: Settings) -> bool:
    """True if all logits are needed: the inputs of the head are measured, or the model computes no fewer."""
    if settings.fisher or not settings.only or not takes_columns(model):
        return True
    head = getattr(model, "get_base_model", lambda: model)().get_output_embeddings()
    return any(binding.parameters[n] is getattr(head, "weight", None) for n in settings.only)


def _length(row: Row) -> int:
    """Characters of a row, by which rows are batched."""
    return sum(len(str(v)) for v in row.values() if isinstance(v, str | list))


def split_folds(batches: Sequence[InputBatch], rows: Sequence[Row], folds: Sequence[int]) -> list[list[InputBatch]]:
    """Samples of each fold.

    Args:
        batches: of the rows by their length, see `Asking.batches`; or none.
        folds: number of each row.
    """
    order = iter(sorted(range(len(rows)), key=lambda n: _length(rows[n])))
    numbered = [(batch, [folds[next(order)] for _ in range(batch.samples)]) for batch in batches]
    return [
        [batch.rows([n for n, k in enumerate(numbers) if k == fold]) for batch, numbers in numbered if fold in numbers]
        for fold in range(max(folds) + 1)
    ]


def _fold(model: nn.Module, written: list[InputBatch], answered: Sequence[InputBatch]) -> Fold:
    """A fold with the expert's answers; `answered`: the same inputs with right answers."""
    graded = list[InputBatch]()
    if answered:
        pairs = [labeled_by_answers(batch, right) for batch, right in zip(written, answered, strict=True)]
        written, graded = [batch for batch, _ in pairs], [other for _, other in pairs]
    batches, others = (of_similar_lengths(some, model) for some in (written, graded))
    return Fold(batches, keep_answers(model, batches), others, keep_answers(model, others))


def _row(label: str, question: Question, merged: Compared, rivals: Mapping[str, Compared]) -> AgreementRow:
    answers, same, inputs = merged.own, sum(merged.kept), question.inputs
    low, high = wilson_interval(same / inputs, inputs) if inputs >= FEW else (None, None)
    return AgreementRow(
        expert=label,
        data=question.source,
        inputs=inputs,
        kept=same,
        predictions=sum(answers.predictions),
        disagreement=sum(answers.differing) / sum(answers.predictions),
        divergence=math.fsum(answers.divergence) / sum(answers.predictions),
        low=low,
        high=high,
        measured=question.measured,
        unended=question.unended,
        accuracy=merged.accuracy,
        expert_accuracy=question.right,
        **{name: _rival(merged, other) for name, other in rivals.items()},
    )


def _rival(merged: Compared, other: Compared) -> RivalAnswers:
    """Another merge, on the same inputs."""
    pairs = list(zip(merged.kept, other.kept, strict=True))
    return RivalAnswers(sum(other.kept), pairs.count((True, False)), pairs.count((False, True)), other.accuracy)


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
    run: RunSettings,
    progress: Progress,
) -> tuple[AgreementRow, ...]:
    """Rows of `actmat.agreement`."""
    place = Path(directory)
    recipe = recipe_of_output(place)
    config, _ = _looked_at(str(base or recipe.base or place))
    sources = read_sources(recipe, data, settings, config, measured=False)
    experts = {e.label: e.path for e in recipe.experts if e.label in sources}
    if base is not None and not any(needs for _, needs in map(_looked_at, (str(place), *experts.values()))):
        raise StatisticsError(f"A base goes with adapters; {place} and the experts compared are full models.")
    loader = settings.loader(str(base or recipe.base or ""), run)
    asking = Asking(loader, settings, progress)
    sources = asking.with_written(recipe, sources)
    for label, location in experts.items():
        try:
            asking.ask(label, asking.load(location), sources[label])
        except StatisticsError as error:
            raise StatisticsError(f"Expert '{label}' cannot be compared with {place}.", error.problems) from None
    compared = asking.compare(place, "the merge", asking.questions)
    (rows,) = asking.rows([(recipe, compared)], asking.rivals(recipe, place.parent, {}))
    return rows


def _looked_at(place: str) -> tuple[Mapping[str, Any], bool]:
    """Config of an input, and whether it needs a base."""
    with locate(place) as located:
        return fields_of(located), isinstance(located, Adapter)
