"""Questions with answers to choose from: prompts of the seven tasks, and rows of data sets by checked column names.

A task knows the forms in which its rows are found: the schema on the hub, and local files. A row whose columns fit none
is an error that names what was expected and what was found; empty or equal answers are malformed rows, which are left
out and counted, one in a hundred at most. A wrong column name must not become an empty text: with two empty choices
every model answers half of the items correctly without an error.

Prompts are in `templates.json`, those of the paper's code.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from actmat.errors import CheckpointError, did_you_mean
from actmat_experiments.harness.hub import kept_rows
from actmat_experiments.harness.results import majority_share


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
    """A task with disjoint parts: to fit, to choose settings, to report.

    Args:
        malformed: rows that were left out, a line each.
    """

    name: str
    train: Sequence[Item] = field(repr=False)
    validation: Sequence[Item] = field(repr=False)
    test: Sequence[Item] = field(repr=False)
    malformed: Sequence[str] = ()

    @property
    def majority(self) -> tuple[int, int]:
        """Right and all answers on the test part of a model that always chooses the most frequent position."""
        return majority_share([item.label for item in self.train], [item.label for item in self.test])

    def key(self, *parts: str) -> dict[str, str]:
        """The name, and the hash of each of these parts, on which results depend."""
        return {"task": self.name, **{part: fingerprint(getattr(self, part)) for part in parts}}


def fingerprint(items: Sequence[Item]) -> str:
    """SHA-256 over all prompts, choices and labels, in order."""
    found = hashlib.sha256()
    for item in items:
        found.update(json.dumps([item.prompt, item.choices, item.label]).encode() + b"\n")
    return found.hexdigest()


@functools.cache
def _environment() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    return SandboxedEnvironment(undefined=StrictUndefined)


@dataclass(frozen=True, slots=True)
class Row:
    """A row as a task means it: texts by field, the row's own answers (or none), the position of the right answer."""

    fields: Mapping[str, str]
    options: tuple[str, ...]
    label: int


@dataclass(frozen=True, slots=True)
class Form:
    """One schema of a task's rows; `a.b` is column `b` inside column `a`.

    Args:
        fields: field of the task -> its column, or columns whose texts are joined.
        label: column of the right answer.
        values: what stands there for each answer, in their order, or the column that lists it.
        options: columns of the answers, or the column that holds all, as a list or by `values`; empty: no and yes.
    """

    name: str
    fields: Mapping[str, str | tuple[str, ...]]
    label: str = "label"
    values: tuple[str, ...] | str = ("0", "1")
    options: tuple[str, ...] | str = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a row must have."""
        named = [*self.fields.values(), self.options, self.values if isinstance(self.values, str) else (), self.label]
        flat = [column for some in named for column in ((some,) if isinstance(some, str) else some)]
        return tuple(dict.fromkeys(flat))

    def missing(self, row: Mapping[str, Any]) -> list[str]:
        """Columns that the row lacks."""
        return [column for column in self.columns if not _has(row, column)]

    def read(self, row: Mapping[str, Any]) -> Row:
        """A row that has these columns, as the task means it.

        Raises:
            ValueError: a text is empty or none, answers are equal, or the label is not one of the answers'.
        """
        texts = {n: _at(row, c) if isinstance(c, str) else [_at(row, x) for x in c] for n, c in self.fields.items()}
        options = _at(row, self.options) if isinstance(self.options, str) else [_at(row, c) for c in self.options]
        values = _at(row, self.values) if isinstance(self.values, str) else self.values
        if isinstance(options, Mapping):
            options = list(options.values())
        if options and len(options) != len(values):
            raise ValueError(f"{self.options} has {len(options)} texts and {len(values)} labels")
        fields = {n: " ".join(_text(n, x) for x in (t if isinstance(t, list) else [t])) for n, t in texts.items()}
        answers = tuple(_text(f"answer {n}", option) for n, option in enumerate(options, start=1))
        if len(set(answers)) < len(answers):
            raise ValueError(f"its answers are not distinct: {answers}")
        found, known = _at(row, self.label), [str(value) for value in values]
        found = int(found) if isinstance(found, bool) else found
        if str(found) not in known:
            raise ValueError(f"{self.label} is {found!r}, not one of {known}; rows without a label cannot be used")
        return Row(fields, answers, known.index(str(found)))


def _at(row: Mapping[str, Any], column: str) -> Any:
    first, _, rest = column.partition(".")
    return _at(row[first], rest) if rest else row[first]


def _has(row: Mapping[str, Any], column: str) -> bool:
    first, _, rest = column.partition(".")
    return first in row and (not rest or (isinstance(row[first], Mapping) and _has(row[first], rest)))


def _text(name: str, value: Any) -> str:
    if not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{name} is {value!r}, not a text")
    return value.strip()


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _story(name: str, sentence: str, endings: str, answer: str) -> Form:
    sentences, both = tuple(sentence.format(n) for n in range(1, 5)), (endings.format(1), endings.format(2))
    return Form(name, {"story": sentences}, answer, ("1", "2"), both)


_QASC = _same("question", "fact1", "fact2")
_WINOGRANDE = _same("sentence", "option1", "option2")
_TWO = ("option1", "option2")

FORMS: dict[str, tuple[Form, ...]] = {
    "qasc": (
        Form("the hub", _QASC, "answerKey", "choices.label", "choices.text"),
        Form("local files", _QASC, values="choices", options="choices"),
    ),
    "wikiqa": (
        Form("the hub", {"question": "question", "sentence": "answer"}),
        Form("local files", _same("question", "sentence")),
    ),
    "quartz": (
        Form("the hub", {"question": "question", "paragraph": "para"}, "answerKey", "choices.label", "choices.text"),
    ),
    "paws": (Form("the hub", _same("sentence1", "sentence2")),),
    "story_cloze": (
        _story("the hub", "input_sentence_{}", "sentence_quiz{}", "answer_right_ending"),
        _story("the authors' CSV", "InputSentence{}", "RandomFifthSentenceQuiz{}", "AnswerRightEnding"),
        _story("the paper's CSV", "input_sentence{}", "random_fifth_sentence_quiz{}", "answer_right_ending"),
    ),
    "winogrande": (
        Form("the hub", _WINOGRANDE, "answer", ("1", "2"), _TWO),
        Form("local files", _WINOGRANDE, values=_TWO, options=_TWO),
    ),
    "wsc": (
        Form("the hub", {"text": "text", "referent": "span1_text", "pronoun": "span2_text"}),
        Form("SuperGLUE's files", {"text": "text", "referent": "target.span1_text", "pronoun": "target.span2_text"}),
    ),
}
"""Task -> the forms of its rows; the first one that fits is taken."""


TEMPLATES: dict[str, str] = json.loads(
    files("actmat_experiments.language").joinpath("templates.json").read_text(encoding="utf-8")
)
"""Task -> the prompt of the paper's code, in Jinja, with the fields of a row, `choices` (the answers) and `options` (a
list of them, a line each)."""


def read_rows(task: str, rows: Iterable[Mapping[str, Any]], where: str) -> tuple[list[Row], list[str]]:
    """All rows as the task means them, without malformed ones, and a line for each of those.

    Args:
        task: key of `FORMS`.
        rows: as a data set has them.
        where: file or data set, for messages.

    Raises:
        CheckpointError: columns are missing, or more than one row in a hundred is malformed.
    """
    every = list(rows)
    if every and all(form.missing(every[0]) for form in FORMS[task]):  # a file has one schema
        raise CheckpointError(f"{where} cannot be used as {task}.", [f"row 1: {_no_form(task, every[0])}"])

    def read(row: Mapping[str, Any]) -> Row:
        form = next((form for form in FORMS[task] if not form.missing(row)), None)
        if form is None:
            raise ValueError(_no_form(task, row))
        return form.read(row)

    found, malformed = kept_rows(every, read, f"{where} as {task}")
    return found, [f"{where}, {line}" for line in malformed]


def _no_form(task: str, row: Mapping[str, Any]) -> str:
    wanted = []
    for form in FORMS[task]:
        missing = form.missing(row)
        hints = "".join(did_you_mean(column, row) for column in missing)
        wanted.append(f"{', '.join(form.columns)} (as in {form.name}; missing {', '.join(missing)}.{hints})")
    return f"has the columns {', '.join(map(str, row))}; expected {' or '.join(wanted)}"


def to_items(task: str, rows: Sequence[Row]) -> list[Item]:
    """Rows as questions; of a task whose rows have no answers of their own these are no and yes."""
    template, found = _environment().from_string(TEMPLATES[task]), []
    for row in rows:
        choices, options = row.options or ("No", "Yes"), "\n".join(f"- {option}" for option in row.options)
        text = template.render(**row.fields, choices=choices, options=options)
        found.append(Item(text.strip(), choices, row.label))
    return found
