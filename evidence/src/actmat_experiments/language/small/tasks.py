"""Seven classification tasks as text to text, from local files, and the texts to pretrain on.

Files are JSON lines `{"text": ..., "label": ...}`, `<file>.train.jsonl` and `<file>.test.jsonl` in one folder. Some of
these sets share sentences (SST-2 was made from MR), so a text that is tested or validated anywhere is taken out of all
training data and out of the pretraining corpus.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actmat.errors import CheckpointError
from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.lines import json_lines
from actmat_experiments.language.questions import Item, TextTask


@dataclass(frozen=True, slots=True)
class SmallTask:
    """Files of a task, and its question.

    Args:
        file: first part of the names of its files.
        prompt: text with `{text}`.
        answers: label in the file -> answer, words of one token or two where the vocabulary is not tiny.
        cut: parts of a text that are layout of the file.
    """

    name: str
    file: str
    prompt: str
    answers: Mapping[Any, str]
    cut: tuple[str, ...] = ()


_SENTIMENT = {0: "bad", 1: "good"}
_TOPICS = {"World": "world", "Sports": "sports", "Business": "business", "Science or Technology": "technology"}
_QUESTIONS = {0: "meaning", 1: "thing", 2: "letters", 3: "person", 4: "place", 5: "number"}

SMALL_TASKS: tuple[SmallTask, ...] = (
    SmallTask("agnews", "agnews", "news topic: {text}", _TOPICS, cut=("Title: ", "Text: ")),
    SmallTask("subj", "subj", "review or plot: {text}", {0: "review", 1: "plot"}),
    SmallTask("trec", "trec", "question about: {text}", _QUESTIONS),
    SmallTask("sst2", "sst2", "film phrase: {text}", {"Bad": "bad", "Good": "good"}, cut=("Text: ",)),
    SmallTask("mr", "mr", "film review: {text}", _SENTIMENT),
    SmallTask("cr", "custrev", "product review: {text}", _SENTIMENT),
    SmallTask("mpqa", "mpqa", "phrase: {text}", _SENTIMENT),
)

EXTRA_TEXTS: Mapping[str, tuple[str, ...]] = {
    "wikiqa.train.jsonl": ("question", "sentence"),
    "rte.train.jsonl": ("premise", "hypothesis"),
}
"""Files whose columns are further texts to pretrain on, where they are there."""


@dataclass(frozen=True, slots=True)
class SmallData:
    """All tasks, and the corpus: texts of the training parts and of `EXTRA_TEXTS`, none that is validated or tested."""

    tasks: tuple[TextTask, ...]
    corpus: tuple[str, ...]


def load_small(folder: Path, *, seed: int, n_validation: int, n_test: int | None = None) -> SmallData:
    """Read, split and clean.

    Args:
        seed: which training rows are the validation part, and the order of the others: the first ones are what the
            base's mixture and the statistics see, and files may be sorted by label.
        n_validation: how many, per task.
        n_test: test rows per task, the same for all seeds; default: all. No text of the others is trained on.

    Raises:
        CheckpointError: files are missing or hold something else; all problems in one message.
    """
    problems: list[str] = []
    parts = {t.name: {p: _read(folder, t, p, problems) for p in ("train", "test")} for t in SMALL_TASKS}
    for task in SMALL_TASKS:
        if not problems and len(parts[task.name]["train"]) <= n_validation:
            problems.append(f"{task.file}.train.jsonl has too few rows for {n_validation} to validate on")
    if problems:
        raise CheckpointError(f"The data of the small language experiment in {folder} cannot be used.", problems)
    for name, part in parts.items():
        order = torch.randperm(len(part["train"]), generator=generator_for(seed, f"validation {name}")).tolist()
        part["validation"] = [part["train"][n] for n in order[:n_validation]]
        part["train"] = [part["train"][n] for n in order[n_validation:]]
    held_out = {_bare(text) for part in parts.values() for p in ("validation", "test") for text, _ in part[p]}
    for part in parts.values():
        part["train"] = [row for row in part["train"] if _bare(row[0]) not in held_out]
    corpus = [text for part in parts.values() for text, _ in part["train"]]
    corpus += [text for text in _extra(folder) if _bare(text) not in held_out]
    for name, part in parts.items():
        order = torch.randperm(len(part["test"]), generator=generator_for(0, f"test {name}")).tolist()
        part["test"] = [part["test"][n] for n in sorted(order[:n_test])]  # files may be sorted by label
    items = {t.name: {part: _items(t, rows) for part, rows in parts[t.name].items()} for t in SMALL_TASKS}
    tasks = [TextTask(name, part["train"], part["validation"], part["test"]) for name, part in items.items()]
    return SmallData(tuple(tasks), tuple(dict.fromkeys(corpus)))


def _read(folder: Path, task: SmallTask, part: str, problems: list[str]) -> list[tuple[str, int]]:
    """Text and position of the label among the answers."""
    path = folder / f"{task.file}.{part}.jsonl"
    if not path.is_file():
        problems.append(f"{path.name} is missing")
        return []
    labels = list(task.answers)
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["text"]
            for layout in task.cut:
                text = text.replace(layout, "", 1)
            rows.append((" ".join(text.split()), labels.index(row["label"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f'{path.name}:{number}: not {{"text": ..., "label": one of {labels}}}: {error}')
    return [(text, label) for text, label in rows if text]  # the product reviews have four empty rows


def _extra(folder: Path) -> Iterable[str]:
    for file, columns in EXTRA_TEXTS.items():
        path = folder / file
        if path.is_file():
            for row in json_lines(path.read_text(encoding="utf-8")):
                yield from (row[column] for column in columns)


def _bare(text: str) -> str:
    """Only letters and digits: copies of one sentence differ in spaces and punctuation."""
    return "".join(c for c in text.lower() if c.isalnum())


def _items(task: SmallTask, rows: Sequence[tuple[str, int]]) -> list[Item]:
    answers = tuple(task.answers.values())
    return [Item(task.prompt.format(text=text), answers, label) for text, label in rows]
