"""Eight tasks for a chat model, each in the words of the training and in other words of the same questions.

Seven are local JSON lines, those of `benchmarks.data`; `record` is drawn. Rows of one group (a premise, a text) are in
one part only, and the parts are the same for all seeds. Long prompts are left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from actmat.errors import CheckpointError
from actmat_experiments.harness.lines import read_files
from actmat_experiments.pretrained.generated import END_OF_TURN, MONTHS, NAMES, Generated, Question, turn
from actmat_experiments.pretrained.instructions.texts import Asked, draw_parts

Words = Literal["training", "other"]
WORDS: tuple[Words, ...] = ("training", "other")
"""The words in which a question is asked: those of the training, and others."""
MOST_WORDS = 60
"""Of a prompt in the words of the training; longer ones are left out, for the memory of a batch."""
_RECORDS = 1600


class Phrased(NamedTuple):
    """A question in both wordings, its answer, and the group whose rows stay in one part."""

    group: str
    training: str
    other: str
    answer: str


class Worded(NamedTuple):
    """A task in both wordings; the same rows are in the same places of the same parts."""

    name: str
    training: Generated
    other: Generated

    def part(self, words: Words, part: str) -> Sequence[Question]:
        """Questions of a part ("train", "validation", "test")."""
        questions: Sequence[Question] = getattr(getattr(self, words), part)
        return questions

    @property
    def content(self) -> Mapping[str, str]:
        """Hashes of all parts in both wordings."""
        return {f"{part}, {words}": h for words in WORDS for part, h in getattr(self, words).content.items()}


Row = Mapping[str, Any]
_KINDS = ("Description", "Entity", "Abbreviation", "Human", "Number", "Location")
"""Answers of `trec`, by its labels."""


def _agnews(row: Row) -> Phrased:
    title, _, text = (part.strip() for part in row["text"].removeprefix("Title: ").partition("\nText: "))
    other = (
        f'I have just read this in the paper: "{title}. {text}" In which section would I find it: World, Sports, '
        "Business, or Science or Technology?"
    )
    return Phrased(f"{title} {text}", f"Headline: {title}\n{text}\nTopic?", other, row["label"])


def _trec(row: Row) -> Phrased:
    text = row["text"]
    other = f'Somebody asks me "{text}" Say which kind of thing the answer has to be.'
    return Phrased(text, f"Question: {text}\nAnswer type?", other, _KINDS[row["label"]])


def _sst2(row: Row) -> Phrased:
    text = row["text"].removeprefix("Text: ").strip()
    other = f"A critic wrote: {text} Did the critic like the film or not?"
    return Phrased(text, f"Review: {text}\nSentiment?", other, row["label"])


def _subj(row: Row) -> Phrased:
    text = row["text"]
    other = f"Does this tell the plot or what somebody thinks? {text}"
    return Phrased(text, f"Sentence: {text}\nOpinion or fact?", other, ("Opinion", "Fact")[row["label"]])


def _rte(row: Row) -> Phrased:
    premise, hypothesis = row["premise"], row["hypothesis"]
    other = f"{premise} Can I conclude from this that {hypothesis}"
    training = f"Premise: {premise}\nHypothesis: {hypothesis}\nEntailed?"
    return Phrased(premise, training, other, "yes" if row["label"] == "entailment" else "no")


def _qasc(row: Row) -> Phrased:
    question, choices = row["question"], row["choices"]
    training = "\n".join([question, *(f"({letter}) {text}" for letter, text in choices.items())])
    listed = ", ".join(f"{letter} = {text}" for letter, text in choices.items())
    return Phrased(
        row["fact1"], training, f"Please help me with a quiz. {question} Choose from: {listed}", row["label"]
    )


def _copa(row: Row) -> Phrased:
    text = row["text"]
    other = text.replace("Choose one between A and B.", "").replace("\n", " ")
    return Phrased(text.partition('"')[2].partition('"')[0], text, f"Decide for me, please. {other}", row["label"])


def _record(row: Row) -> Phrased:
    name, city, day, month, year = (row[field] for field in ("name", "city", "day", "month", "year"))
    born = f"{year}-{MONTHS.index(month) + 1:02}-{day:02}"
    training = f"Record: {name}, {city}, born {day} {month} {year}."
    other = f"Make data of this: on {month} {day} of {year}, in {city}, {name} was born."
    return Phrased(training, training, other, json.dumps({"name": name, "city": city, "born": born}))


_CITIES = (*("Lima", "Oslo", "Cairo", "Quito", "Delhi", "Tunis", "Perth", "Turin", "Porto", "Sofia", "Kyoto", "Accra"),)


def _draw_records() -> Iterator[Row]:
    generator = random.Random("questions of record in two wordings")
    for _ in range(_RECORDS):
        yield {
            "name": generator.choice(NAMES),
            "city": generator.choice(_CITIES),
            "day": generator.randrange(1, 29),
            "month": generator.choice(MONTHS),
            "year": generator.randrange(1950, 2006),
        }


TASKS: Mapping[str, tuple[str, Callable[[Row], Phrased]]] = {
    "agnews": ("agnews.train.jsonl", _agnews),
    "trec": ("trec.train.jsonl", _trec),
    "sst2": ("sst2.train.jsonl", _sst2),
    "subj": ("subj.train.jsonl", _subj),
    "rte": ("rte.train.jsonl", _rte),
    "qasc": ("qasc.dev.jsonl", _qasc),
    "copa": ("copa.train.jsonl", _copa),
    "record": ("", _record),
}
"""Name -> file, and the reading of its rows, in the order of the tables; a task without a file is drawn."""


def load_tasks(folder: Path, names: Sequence[str], *, train: int, validation: int, test: int) -> list[Worded]:
    """Read or draw the rows of tasks, and put them into parts.

    Args:
        train, validation, test: largest number of questions.

    Raises:
        CheckpointError: files are missing or hold something else; all problems in one message.
    """
    problems: list[str] = []
    phrased = {name: _phrase(folder, name, problems) for name in names}
    if problems:
        raise CheckpointError(f"The data of the tasks in {folder} cannot be used.", problems)
    sizes = (train, validation, test)
    return [
        Worded(name, *(draw_parts(name, _ask(rows, w), [], sizes) for w in WORDS)) for name, rows in phrased.items()
    ]


def _phrase(folder: Path, name: str, problems: list[str]) -> list[Phrased]:
    file, phrase = TASKS[name]
    if not file:
        return list(map(phrase, _draw_records()))
    files = read_files(folder, name, [file], lambda rows: list(map(phrase, rows)), problems)
    return [row for rows in files for row in rows if len(row.training.split()) <= MOST_WORDS]


def _ask(rows: Sequence[Phrased], words: Words) -> list[Asked]:
    """The questions in a wording, as they stand in a user's turn."""
    return [
        Asked(" ".join(row.group.lower().split()), Question(turn(getattr(row, words)), row.answer + END_OF_TURN))
        for row in rows
    ]
