"""Text tasks with head-room for an encoder of sentences, from local JSON lines.

Topics and questions are what such an encoder was trained for; an expert gains on tone, on pairs of texts, on the order
of words, and on words whose letters were moved. Files are those of `language-small` and `language`: `text` and `label`
for single texts, `<file>.train.jsonl` and `<file>.test.jsonl`; pairs have columns of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from actmat.errors import CheckpointError
from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.cache import digest
from actmat_experiments.harness.lines import read_files
from actmat_experiments.harness.results import majority_share


class Example(NamedTuple):
    """A text, or two, and the position of its label among the task's."""

    text: str
    second: str
    label: int


@dataclass(frozen=True, slots=True)
class TextSet:
    """A task of text classification.

    Args:
        content: part -> hash of its examples.
    """

    name: str
    n_classes: int
    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]
    content: Mapping[str, str]

    @property
    def majority(self) -> tuple[int, int]:
        """Right and all answers on the test part of a model that always gives the most frequent training answer."""
        return majority_share([e.label for e in self.train], [e.label for e in self.test])


Row = Mapping[str, Any]
Raw = tuple[str, str, Any]
"""A text, a second one or nothing, and a label as the file has it."""


@dataclass(frozen=True, slots=True)
class Source:
    """Files of a task, and their reading.

    Args:
        files: of its training rows and of its test rows; of a single file, a fifth is tested.
        read: all rows of a file -> raw examples.
    """

    files: tuple[str, ...]
    read: Callable[[Sequence[Row]], list[Raw]]


def _split(file: str) -> tuple[str, str]:
    return f"{file}.train.jsonl", f"{file}.test.jsonl"


def _single(rows: Sequence[Row]) -> list[Raw]:
    """`text` and `label`, without the words `Title:` and `Text:` of some files."""
    return [(r["text"].replace("Title: ", "", 1).replace("Text: ", "", 1).strip(), "", r["label"]) for r in rows]


def _pairs(rows: Sequence[Row]) -> list[Raw]:
    """Does the first text entail the second one?"""
    return [(r["premise"], r["hypothesis"], r["label"]) for r in rows]


def _letters_moved(rows: Sequence[Row]) -> list[Raw]:
    """Every word of four letters or more keeps its first and its last one; those between are in random order."""
    return [
        (" ".join(_moved(w, f"{n} {w}") for w in text.split()), "", label) for n, (text, _, label) in _numbered(rows)
    ]


def _moved(word: str, key: str) -> str:
    order = torch.randperm(max(0, len(word) - 2), generator=generator_for(0, key)).tolist()
    return word if len(word) < 4 else word[0] + "".join(word[1 + i] for i in order) + word[-1]


def _backwards(rows: Sequence[Row]) -> list[Raw]:
    """Every word is written from its end."""
    return [(" ".join(w[::-1] for w in text.split()), "", label) for text, _, label in _single(rows)]


def _order(rows: Sequence[Row]) -> list[Raw]:
    """Is the text as it was written (0), or were four of its words in a row put in reverse order (1)?"""
    found: list[Raw] = []
    for n, (text, _, _) in _numbered(rows):
        words, label = text.split(), n % 2
        if len(words) < 8:
            continue
        start = int(torch.randint(0, len(words) - 4, (), generator=generator_for(0, f"order {n}")))
        if label:
            words[start : start + 4] = words[start : start + 4][::-1]
        found.append((" ".join(words), "", label))
    return found


def _numbered(rows: Sequence[Row]) -> list[tuple[int, Raw]]:
    return list(enumerate(_single(rows)))


TASKS: Mapping[str, Source] = {
    "trec": Source(_split("trec"), _single),
    "trec_backwards": Source(_split("trec"), _backwards),
    "agnews_letters": Source(_split("agnews"), _letters_moved),
    "mr": Source(_split("mr"), _single),
    "cr": Source(_split("custrev"), _single),
    "mpqa": Source(_split("mpqa"), _single),
    "order": Source(_split("subj"), _order),
}
"""Name -> source."""

FRESH: Mapping[str, Source] = {
    "sst2": Source(_split("sst2"), _single),
    "rte": Source(("rte.train.jsonl", "rte.val.jsonl"), _pairs),
    "agnews_backwards": Source(_split("agnews"), _backwards),
    "subj_letters": Source(_split("subj"), _letters_moved),
    "mr_letters": Source(_split("mr"), _letters_moved),
    "cr_backwards": Source(_split("custrev"), _backwards),
    "trec_letters": Source(_split("trec"), _letters_moved),
}
"""Tasks that run only on request. No default was chosen on them: docs/choosing.md has what `auto` gives."""


def load_texts(folder: Path, names: Sequence[str], *, train: int, validation: int, test: int) -> list[TextSet]:
    """Read, draw and cut, the same for all seeds. No text that is tested or validated is trained on.

    Args:
        train, validation, test: largest number of examples.

    Raises:
        CheckpointError: files are missing or hold something else; all problems in one message.
    """
    problems: list[str] = []
    raw = {name: _raw(folder, name, problems) for name in names}
    if problems:
        raise CheckpointError(f"The data of the text tasks in {folder} cannot be used.", problems)
    return [_cut(name, *raw[name], (train, validation, test)) for name in names]


def _raw(folder: Path, name: str, problems: list[str]) -> tuple[list[Raw], list[Raw]]:
    """Raw examples to learn from, and to test on."""
    source = {**TASKS, **FRESH}[name]
    parts = read_files(folder, name, source.files, source.read, problems)
    if len(parts) < len(source.files):
        return [], []
    learnt, tested = ([row for row in part if row[0]] for part in parts)
    return learnt, tested


def _cut(name: str, learnt: Sequence[Raw], tested: Sequence[Raw], sizes: tuple[int, int, int]) -> TextSet:
    labels = sorted({row[2] for row in learnt}, key=str)
    train, validation, test = sizes

    def drawn(rows: Sequence[Raw], part: str) -> list[Example]:
        order = torch.randperm(len(rows), generator=generator_for(0, f"{part} {name}")).tolist()
        return [Example(rows[i][0], rows[i][1], labels.index(rows[i][2])) for i in order]

    test_part = drawn(tested, "test")[:test]
    rest = drawn(learnt, "train")
    parts = {"validation": rest[:validation], "test": test_part}
    held = {e[:2] for some in parts.values() for e in some}
    parts["train"] = [e for e in rest[validation:] if e[:2] not in held][:train]
    content = {part: digest([list(e) for e in some]) for part, some in parts.items()}
    return TextSet(name, len(labels), parts["train"], parts["validation"], parts["test"], content)
