"""Public texts as instructions with answers to choose from. Files are local JSON lines, those of `benchmarks.data`.

Rows of one group (a premise, a question, a text) are in one part only, so that nothing that is tested or validated was
trained on. The parts are the same for all seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from actmat.errors import CheckpointError
from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.cache import digest
from actmat_experiments.harness.lines import read_files
from actmat_experiments.pretrained.generated import END_OF_TURN, Generated, Question, turn

WORDS, MOST_WORDS = 32, 50
"""Words of a text that are read; and words of a text that must be read whole, or the question is left out."""

Item = TypeVar("Item")


class Asked(NamedTuple):
    """A question, and the group whose rows stay in one part."""

    group: str
    question: Question


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Source:
    """Files of a task, and their reading.

    Args:
        learnt: files of its training rows.
        tested: files of its test rows; none: they are drawn from all rows.
        read: rows -> questions.
    """

    learnt: tuple[str, ...]
    tested: tuple[str, ...]
    read: Callable[[Rows], Iterator[Asked]]


def _ask(group: str, text: str, options: Sequence[str], label: int) -> Asked:
    ended = tuple(f"{option}{END_OF_TURN}" for option in options)
    return Asked(" ".join(group.lower().split()), Question(turn(text), ended[label], ended))


def _cut(text: str) -> str:
    return " ".join(text.replace("Title: ", "", 1).replace("Text: ", "", 1).split()[:WORDS])


def _short(rows: Rows, text: str) -> Iterator[Mapping[str, Any]]:
    return (row for row in rows if len(row[text].split()) <= MOST_WORDS)


def _labeled(rows: Rows, *, ask: str, answers: Mapping[Any, str]) -> Iterator[Asked]:
    """Rows of `text` and `label`."""
    labels = list(answers)
    for row in rows:
        if text := _cut(row["text"]):
            yield _ask(text, f"{ask}\n{text}", tuple(answers.values()), labels.index(row["label"]))


def _rte(rows: Rows) -> Iterator[Asked]:
    for row in _short(rows, "premise"):
        text = f"{row['premise']}\nDoes it follow that {row['hypothesis']}"
        yield _ask(row["premise"], text, ("no", "yes"), ("not_entailment", "entailment").index(row["label"]))


def _wikiqa(rows: Rows) -> Iterator[Asked]:
    """Of every question its first right sentence and, where it has one, the first wrong one."""
    seen = set()
    for row in rows:
        if (key := (row["qid"], row["label"])) not in seen:
            seen.add(key)
            text = f"Does the sentence answer?\nQuestion: {row['question']}\nSentence: {_cut(row['sentence'])}"
            yield _ask(row["question"], text, ("no", "yes"), row["label"])


def _copa(rows: Rows) -> Iterator[Asked]:
    """`Which sentence is the cause of "X."? Choose one between A and B.`, then the two."""
    for row in rows:
        asked, first, second = row["text"].split("\n")
        kind, premise = asked.removeprefix("Which sentence is the ").split(" of ", 1)
        premise = premise.removesuffix(" Choose one between A and B.").removesuffix("?").strip('"')
        text = f"{premise} {'Why?' if kind == 'cause' else 'What happened then?'}"
        yield _ask(premise, text, (first.removeprefix("A: "), second.removeprefix("B: ")), "AB".index(row["label"]))


def _qasc(rows: Rows) -> Iterator[Asked]:
    for row in rows:
        text = f"{_cut(row['fact1'])} {_cut(row['fact2'])}\n{row['question']}"
        yield _ask(row["fact1"], text, tuple(row["choices"].values()), list(row["choices"]).index(row["label"]))


def _winogrande(rows: Rows) -> Iterator[Asked]:
    for row in rows:
        options = (row["option1"], row["option2"])
        text = f"What should stand in place of _?\n{row['sentence']}"
        yield _ask(" ".join(sorted(options)), text, options, ("option1", "option2").index(row["label"]))


def _wsc(rows: Rows) -> Iterator[Asked]:
    for row in _short(rows, "text"):
        of, pronoun = row["target"]["span1_text"], row["target"]["span2_text"]
        text = f"{row['text']}\nDoes “{pronoun}” mean “{of}”?"
        yield _ask(row["text"], text, ("no", "yes"), int(row["label"]))


def _both(file: str) -> tuple[tuple[str], tuple[str]]:
    return (f"{file}.train.jsonl",), (f"{file}.test.jsonl",)


def _classes(file: str, ask: str, answers: Mapping[Any, str]) -> Source:
    return Source(*_both(file), partial(_labeled, ask=ask, answers=answers))


_TONE = {0: "negative", 1: "positive"}
_TOPICS = {"World": "world", "Sports": "sports", "Business": "business", "Science or Technology": "technology"}
_SOUGHT = {0: "description", 1: "thing", 2: "abbreviation", 3: "person", 4: "place", 5: "number"}

TASKS: Mapping[str, Source] = {
    "agnews": _classes("agnews", "Is this news about world, sports, business or technology?", _TOPICS),
    "subj": _classes("subj", "Is this from a review or from a plot?", {0: "review", 1: "plot"}),
    "trec": _classes("trec", "Is a description, thing, abbreviation, person, place or number asked for?", _SOUGHT),
    "mr": _classes("mr", "Is this film review negative or positive?", _TONE),
    "cr": _classes("custrev", "Is this product review negative or positive?", _TONE),
    "mpqa": _classes("mpqa", "Is this phrase negative or positive?", _TONE),
    "rte": Source(("rte.train.jsonl",), ("rte.val.jsonl",), _rte),
    "wikiqa": Source(*_both("wikiqa"), _wikiqa),
    "copa": Source(("copa.train.jsonl", "copa.test.jsonl"), (), _copa),
    "qasc": Source(("qasc.dev.jsonl",), (), _qasc),
    "winogrande": Source(("winogrande.dev.jsonl",), (), _winogrande),
    "wsc": Source(("wsc.train.jsonl", "wsc.val.jsonl"), (), _wsc),
}
"""Name -> source, in the order of the tables."""
MORE = ("rte", "copa", "winogrande", "wsc")
"""Tasks that are run only for a request that names them; the others take a night."""


def load_options(folder: Path, names: Sequence[str], *, train: int, validation: int, test: int) -> list[Generated]:
    """Read, draw and cut.

    Args:
        train, validation, test: largest number of questions.

    Raises:
        CheckpointError: files are missing or hold something else; all problems in one message.
    """
    problems: list[str] = []
    found = [(name, *_read(folder, name, problems)) for name in names]
    if problems:
        raise CheckpointError(f"The data of the tasks in {folder} cannot be used.", problems)
    return [draw_parts(name, learnt, tested, (train, validation, test)) for name, learnt, tested in found]


def _read(folder: Path, name: str, problems: list[str]) -> tuple[list[Asked], list[Asked]]:
    source = TASKS[name]

    def asked(files: Sequence[str]) -> list[Asked]:
        return list(itertools.chain(*read_files(folder, name, files, lambda rows: list(source.read(rows)), problems)))

    return asked(source.learnt), asked(source.tested)


def draw_parts(name: str, learnt: list[Asked], tested: list[Asked], sizes: tuple[int, int, int]) -> Generated:
    """The parts of a task, drawn by its name and the groups of its rows: other texts of the same rows are drawn alike.

    Args:
        learnt: rows to train on.
        tested: rows to test on; none: they are drawn from those to train on.
        sizes: of the parts for training, validation and test, at most.
    """
    train, validation, test = sizes
    groups = _shuffled(f"groups {name}", list(dict.fromkeys(a.group for a in learnt)))
    rank = {group: n for n, group in enumerate(groups)}
    by_group = sorted(learnt, key=lambda a: rank[a.group])
    parts: dict[str, list[Question]] = {}
    held: set[str] = set()
    for part, n, some in (
        ("test", test, _shuffled(f"test {name}", tested) or by_group),
        ("validation", validation, by_group),
        ("train", train, _shuffled(f"train {name}", learnt)),
    ):
        taken = [a for a in some if a.group not in held][:n]
        parts[part] = [a.question for a in taken]
        held |= {a.group for a in taken}
    content = {part: digest([list(q) for q in some]) for part, some in parts.items()}
    return Generated(name, "sft", **parts, content=content)


def _shuffled(purpose: str, some: Sequence[Item]) -> list[Item]:
    return [some[i] for i in torch.randperm(len(some), generator=generator_for(0, purpose)).tolist()]
