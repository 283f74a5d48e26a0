"""Questions with answers to choose from: prompts of the seven tasks, and rows of data sets by checked column names.

A task knows the forms in which its rows are found: the schema on the hub, and local files. A row whose columns fit none
is an error that names what was expected and what was found; so are empty or equal answers. A wrong column name must
not become an empty text: with two empty choices every model is right on half of the items, and nobody notices.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmat.errors import CheckpointError, did_you_mean
from actmat_experiments.harness.results import majority_share

__all__ = [
    "FORMS",
    "TEMPLATES",
    "Item",
    "Row",
    "Template",
    "TextTask",
    "get_template",
    "read_rows",
    "render",
    "to_items",
]


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Args:
        choices: the answers, distinct and not empty.
        label: position of the right one.
    """

    prompt: str
    choices: tuple[str, ...]
    label: int

    @property
    def target(self) -> str:
        """The right answer."""
        return self.choices[self.label]


@dataclass(frozen=True, slots=True)
class TextTask:
    """A task with disjoint parts: to fit, to choose settings, to report."""

    name: str
    train: Sequence[Item] = field(repr=False)
    validation: Sequence[Item] = field(repr=False)
    test: Sequence[Item] = field(repr=False)
    metric: str = "accuracy"

    @property
    def majority(self) -> tuple[int, int]:
        """Right and all answers on the test part of a model that always chooses the most frequent position."""
        return majority_share([item.label for item in self.train], [item.label for item in self.test])

    def key(self, *parts: str) -> dict[str, str]:
        """The name, and the hash of each of these parts: what a result on them depends on."""
        return {"task": self.name, **{part: fingerprint(getattr(self, part)) for part in parts}}


def fingerprint(items: Sequence[Item]) -> str:
    """SHA-256 over all prompts, choices and labels, in order."""
    found = hashlib.sha256()
    for item in items:
        found.update(json.dumps([item.prompt, item.choices, item.label]).encode() + b"\n")
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Template:
    """One way to ask.

    Args:
        name: unique within the task.
        answers: choices that are the same for all rows, in the order of the labels; empty: the row's own.
    """

    name: str
    prompt: str
    answers: tuple[str, ...] = ()

    @property
    def fields(self) -> frozenset[str]:
        """Fields that the prompt mentions."""
        return frozenset(name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None)


_NO_YES = ("No", "Yes")

TEMPLATES: dict[str, tuple[Template, ...]] = {
    "qasc": (
        Template("facts", "{fact1} {fact2}\nWith these two facts in mind: {question}\n{options}"),
        Template("question", "{question}\nWhich of these is the best answer?\n{options}"),
        Template("facts_last", "Question: {question}\nKnown: {fact1} {fact2}\nPossible answers:\n{options}\nAnswer:"),
    ),
    "wikiqa": (
        Template("answers_it", "Question: {question}\nSentence: {sentence}\nDoes the sentence answer it?", _NO_YES),
        Template("found", "I asked: {question}\nI was told: {sentence}\nIs that an answer to what I asked?", _NO_YES),
        Template("good", "Is the text a good answer to the question?\nText: {sentence}\nQuestion: {question}", _NO_YES),
    ),
    "quartz": (
        Template("read_first", "{paragraph}\n{question}\n{options}"),
        Template("question_first", "Question: {question}\n{options}\nThis text helps: {paragraph}\nAnswer:"),
        Template("use_text", "Use the text to choose an answer.\nText: {paragraph}\nQuestion: {question}\n{options}"),
    ),
    "paws": (
        Template("same", "First: {sentence1}\nSecond: {sentence2}\nDo both say the same?", _NO_YES),
        Template("rewritten", "{sentence1}\nCould one also write it this way?\n{sentence2}", _NO_YES),
        Template("paraphrase", 'Is "{sentence2}" a paraphrase of "{sentence1}"?', _NO_YES),
    ),
    "story_cloze": (
        Template("how_ends", "{story}\nHow does this story end?\n{options}"),
        Template("better", "Which ending fits the story better?\nStory: {story}\n{options}"),
        Template("continue", "A story: {story}\nIt can go on in one of these ways:\n{options}\nThe natural one:"),
    ),
    "winogrande": (
        Template("stands_for", "{sentence}\nWhat does the _ stand for?\n{options}"),
        Template("fill", "Fill the blank (_) in: {sentence}\nChoose from:\n{options}"),
        Template("either", "{sentence}\nDoes _ mean {option1} or {option2}?"),
    ),
    "wsc": (
        Template("refers", '{text}\nIn this text, does "{pronoun}" refer to {referent}?', _NO_YES),
        Template("same_thing", 'Text: {text}\nAre "{pronoun}" and "{referent}" the same?', _NO_YES),
        Template("means", '"{pronoun}" stands for "{referent}" in the text below. Is that right?\n{text}', _NO_YES),
    ),
}
"""Task -> its templates; the first one is used for validation and test."""


def get_template(task: str, name: str) -> Template:
    """The template of a task by name; KeyError if there is none."""
    return {t.name: t for t in TEMPLATES[task]}[name]


@dataclass(frozen=True, slots=True)
class Row:
    """A row as a task means it: texts by field, the row's own answers (or none), the position of the right answer."""

    fields: Mapping[str, str]
    options: tuple[str, ...]
    label: int


@dataclass(frozen=True, slots=True)
class Form:
    """One schema of a task's rows.

    Args:
        columns: what a row must have; `a.b` for a column inside a column.
        read: a row that has these columns, as the task means it; `ValueError` for a value that it cannot be.
    """

    name: str
    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Row]

    def missing(self, row: Mapping[str, Any]) -> list[str]:
        """Columns that the row lacks."""
        return [column for column in self.columns if not _has(row, column)]


def _has(row: Mapping[str, Any], column: str) -> bool:
    first, _, rest = column.partition(".")
    if first not in row:
        return False
    return not rest or (isinstance(row[first], Mapping) and _has(row[first], rest))


def _position(value: Any, values: Sequence[Any], column: str) -> int:
    if value in values:
        return list(values).index(value)
    raise ValueError(f"{column} is {value!r}, not one of {list(values)}; rows without a label cannot be used")


def _lettered(row: Mapping[str, Any], fields: Sequence[str], answer: str, **renamed: str) -> Row:
    """`choices: {text: [...], label: [...]}` and the letter of the right one."""
    letters, texts = list(row["choices"]["label"]), tuple(row["choices"]["text"])
    if len(letters) != len(texts):
        raise ValueError(f"choices has {len(texts)} texts and {len(letters)} labels")
    named = {name: row[name] for name in fields} | {new: row[old] for new, old in renamed.items()}
    return Row(named, texts, _position(row[answer], letters, answer))


def _qasc_local(row: Mapping[str, Any]) -> Row:
    letters = list(row["choices"])
    fields = {name: row[name] for name in ("question", "fact1", "fact2")}
    return Row(fields, tuple(row["choices"].values()), _position(row["label"], letters, "label"))


def _binary(row: Mapping[str, Any], **fields: str) -> Row:
    texts = {name: row[column] for name, column in fields.items()}
    return Row(texts, (), _position(row["label"], (0, 1), "label"))


def _story(row: Mapping[str, Any], sentences: Sequence[str], endings: Sequence[str], answer: str) -> Row:
    label = _position(str(row[answer]), ("1", "2"), answer)
    return Row({"story": " ".join(row[s].strip() for s in sentences)}, tuple(row[e] for e in endings), label)


def _winogrande(row: Mapping[str, Any], answer: str, values: Sequence[str]) -> Row:
    options = (row["option1"], row["option2"])
    fields = {name: row[name] for name in ("sentence", "option1", "option2")}
    return Row(fields, options, _position(row[answer], values, answer))


def _wsc(text: str, spans: Mapping[str, Any], label: Any) -> Row:
    fields = {"text": text, "referent": spans["span1_text"], "pronoun": spans["span2_text"]}
    return Row(fields, (), _position(label, (0, 1), "label"))


_HUB_STORY = tuple(f"input_sentence_{n}" for n in range(1, 5))
_HUB_ENDINGS = ("sentence_quiz1", "sentence_quiz2")
_CSV_STORY = tuple(f"InputSentence{n}" for n in range(1, 5))
_CSV_ENDINGS = ("RandomFifthSentenceQuiz1", "RandomFifthSentenceQuiz2")

FORMS: dict[str, tuple[Form, ...]] = {
    "qasc": (
        Form(
            "the hub",
            ("question", "fact1", "fact2", "choices.text", "choices.label", "answerKey"),
            lambda row: _lettered(row, ("question", "fact1", "fact2"), "answerKey"),
        ),
        Form("local files", ("question", "fact1", "fact2", "choices", "label"), _qasc_local),
    ),
    "wikiqa": (
        Form(
            "the hub",
            ("question", "answer", "label"),
            lambda row: _binary(row, question="question", sentence="answer"),
        ),
        Form(
            "local files",
            ("question", "sentence", "label"),
            lambda row: _binary(row, question="question", sentence="sentence"),
        ),
    ),
    "quartz": (
        Form(
            "the hub",
            ("question", "para", "choices.text", "choices.label", "answerKey"),
            lambda row: _lettered(row, ("question",), "answerKey", paragraph="para"),
        ),
    ),
    "paws": (
        Form(
            "the hub",
            ("sentence1", "sentence2", "label"),
            lambda row: _binary(row, sentence1="sentence1", sentence2="sentence2"),
        ),
    ),
    "story_cloze": (
        Form(
            "the hub",
            (*_HUB_STORY, *_HUB_ENDINGS, "answer_right_ending"),
            lambda row: _story(row, _HUB_STORY, _HUB_ENDINGS, "answer_right_ending"),
        ),
        Form(
            "the authors' CSV",
            (*_CSV_STORY, *_CSV_ENDINGS, "AnswerRightEnding"),
            lambda row: _story(row, _CSV_STORY, _CSV_ENDINGS, "AnswerRightEnding"),
        ),
    ),
    "winogrande": (
        Form(
            "the hub",
            ("sentence", "option1", "option2", "answer"),
            lambda row: _winogrande(row, "answer", ("1", "2")),
        ),
        Form(
            "local files",
            ("sentence", "option1", "option2", "label"),
            lambda row: _winogrande(row, "label", ("option1", "option2")),
        ),
    ),
    "wsc": (
        Form(
            "the hub", ("text", "span1_text", "span2_text", "label"), lambda row: _wsc(row["text"], row, row["label"])
        ),
        Form(
            "SuperGLUE's files",
            ("text", "target.span1_text", "target.span2_text", "label"),
            lambda row: _wsc(row["text"], row["target"], row["label"]),
        ),
    ),
}
"""Task -> the forms of its rows; the first one that fits is taken."""


def read_rows(task: str, rows: Iterable[Mapping[str, Any]], where: str) -> list[Row]:
    """All rows as the task means them.

    Args:
        task: key of `FORMS`.
        rows: as a data set has them.
        where: file or data set, for messages.

    Raises:
        CheckpointError: columns are missing, texts empty, answers empty or equal, labels unknown; all in one message.
    """
    found, problems = [], []
    for number, row in enumerate(rows, start=1):
        form = next((form for form in FORMS[task] if not form.missing(row)), None)
        if form is None:
            problems.append(f"row {number}: {_no_form(task, row)}")
            if number == 1:
                break  # a file has one schema: every other row would repeat this
            continue
        try:
            read = form.read(row)
        except (ValueError, TypeError, AttributeError) as error:
            problems.append(f"row {number}: {error}")
            continue
        wrong = _problems(read)
        problems += [f"row {number}: {text}" for text in wrong]
        if not wrong:
            found.append(Row({n: t.strip() for n, t in read.fields.items()}, _stripped(read.options), read.label))
    if not (found or problems):
        problems.append("there are no rows")
    if problems:
        raise CheckpointError(f"{where} cannot be used as {task}.", problems)
    return found


def _no_form(task: str, row: Mapping[str, Any]) -> str:
    wanted = []
    for form in FORMS[task]:
        missing = form.missing(row)
        hints = "".join(did_you_mean(column, row) for column in missing)
        wanted.append(f"{', '.join(form.columns)} (as in {form.name}; missing {', '.join(missing)}.{hints})")
    return f"has the columns {', '.join(map(str, row))}; expected {' or '.join(wanted)}"


def _stripped(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text.strip() for text in texts)


def _problems(row: Row) -> list[str]:
    texts = {**row.fields, **{f"answer {n}": text for n, text in enumerate(row.options, start=1)}}
    found = [f"{name} is {text!r}, not a text" for name, text in texts.items() if not _is_text(text)]
    if found:
        return found
    options = _stripped(row.options)
    if len(set(options)) < len(options):
        found.append(f"its answers are not distinct: {options}")
    if options and row.label >= len(options):
        found.append(f"its label {row.label} counts beyond {len(options)} answers")
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def render(template: Template, row: Row) -> Item:
    """The row, asked in this way."""
    options = "\n".join(f"- {option}" for option in row.options)
    return Item(template.prompt.format(**row.fields, options=options), template.answers or row.options, row.label)


def to_items(task: str, rows: Sequence[Row], *, cycle: bool) -> list[Item]:
    """Rows as questions, asked by the first template, or by all templates in turn (for training)."""
    templates = TEMPLATES[task] if cycle else TEMPLATES[task][:1]
    return [render(templates[n % len(templates)], row) for n, row in enumerate(rows)]
