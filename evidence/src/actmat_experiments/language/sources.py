"""Rows of the seven tasks, from the hub or from files, in parts to train on, to choose on and to test.

| task | train | validation and test |
|---|---|---|
| QASC, Winogrande, WSC | hub train | hub validation (the hub's test has no labels): 32 of its rows, and the others |
| Story Cloze | hub validation | hub test: 32 of its rows, and the others |
| WikiQA, QuaRTz, PAWS | hub train | hub validation; hub test |

The 32 rows are those of the paper's code. Nothing that is tested is chosen on, and nothing that is chosen on is trained
on.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.errors import CheckpointError, MergeError
from actmat_experiments.harness.hub import load_splits
from actmat_experiments.language.questions import Row, TextTask, read_rows, to_items

N_VALIDATION, _SHUFFLE = 32, 42
"""Rows of the test split that are chosen on, and the seed of the paper's code that picks them."""

Fetch = Callable[["Source"], Mapping[str, Iterable[Mapping[str, Any]]]]
"""Split -> rows of a source."""


@dataclass(frozen=True, slots=True)
class Source:
    """One data set.

    Args:
        hub: repository, and configuration if there are several.
        validation: name of the split to choose on; None: `N_VALIDATION` rows of the test split.
        by_hand: why it cannot be had from the hub.
    """

    task: str
    hub: tuple[str, str | None]
    train: str = "train"
    test: str = "test"
    validation: str | None = "validation"
    by_hand: str = ""

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that are needed."""
        return tuple(split for split in (self.train, self.validation, self.test) if split)


SOURCES: dict[str, Source] = {
    s.task: s
    for s in (
        Source("qasc", ("allenai/qasc", None), test="validation", validation=None),
        Source("wikiqa", ("microsoft/wiki_qa", None)),
        Source("quartz", ("allenai/quartz", None)),
        Source("paws", ("google-research-datasets/paws", "labeled_final")),
        Source(
            "story_cloze",
            ("LSDSem/story_cloze", "2016"),
            train="validation",
            validation=None,
            by_hand="its authors give it out on request (https://cs.rochester.edu/nlp/rocstories)",
        ),
        Source("winogrande", ("allenai/winogrande", "winogrande_xl"), test="validation", validation=None),
        Source("wsc", ("aps/super_glue", "wsc.fixed"), test="validation", validation=None),
    )
}
"""Task -> where it is."""

_ALIASES = {"train": ("train",), "validation": ("validation", "dev", "val"), "test": ("test",)}
_ENDINGS = ("jsonl", "csv")


def load_tasks(names: Sequence[str], folder: Path | None, *, fetch: Fetch | None = None) -> list[TextTask]:
    """The tasks, each from files `<task>.<split>.jsonl` (or `.csv`) if the folder has any of it, else from the hub.

    Args:
        names: keys of `SOURCES`.
        fetch: reads a source from the hub; default: the library `datasets`.

    Raises:
        CheckpointError: something is missing or cannot be used; all tasks' problems in one message.
    """
    found, problems = [], []
    for name in names:
        try:
            found.append(_task(SOURCES[name], folder, fetch or from_hub))
        except MergeError as error:
            problems += [f"{error.headline} {p}" if p != error.headline else p for p in error.problems]
    if problems:
        raise CheckpointError("The data of the language experiments are not complete.", problems)
    return found


def _task(source: Source, folder: Path | None, fetch: Fetch) -> TextTask:
    raw: Mapping[str, Iterable[Mapping[str, Any]]] | None = _local(source, folder) if folder is not None else None
    if raw is None:
        if source.by_hand:
            raise CheckpointError(
                f"{source.task} is not on the hub: {source.by_hand}. Put {_wanted(source)} into the folder of --data, "
                "or leave the task out with --tasks."
            )
        raw = {f"{source.hub[0]}, {split}": rows for split, rows in fetch(source).items()}
    read = [read_rows(source.task, rows, where) for where, rows in raw.items()]
    rows = dict(zip(source.splits, (found for found, _ in read), strict=True))
    if source.validation is None:
        validation, test = _held_out(rows[source.test], source.task)
    else:
        validation, test = rows[source.validation], rows[source.test]
    return TextTask(
        source.task,
        train=to_items(source.task, rows[source.train]),
        validation=to_items(source.task, validation),
        test=to_items(source.task, test),
        malformed=[line for _, malformed in read for line in malformed],
    )


def _held_out(rows: Sequence[Row], task: str) -> tuple[list[Row], list[Row]]:
    """Rows to choose on, and the others, to test; which ones never changes."""
    if len(rows) <= N_VALIDATION:
        raise CheckpointError(f"{task} has {len(rows)} rows to test; more than {N_VALIDATION} are needed.")
    shuffled = list(rows)
    random.Random(_SHUFFLE).shuffle(shuffled)
    return shuffled[:N_VALIDATION], shuffled[N_VALIDATION:]


def _wanted(source: Source) -> str:
    return ", ".join(f"{source.task}.{split}.jsonl" for split in source.splits)


def _local(source: Source, folder: Path) -> dict[str, list[dict[str, Any]]] | None:
    """Rows by file, in the order of the splits, or None if the folder has nothing of the task."""
    files = {split: _file(folder, source.task, split) for split in source.splits}
    if not any(files.values()):
        return None
    missing = [split for split, path in files.items() if path is None]
    if missing:
        raise CheckpointError(
            f"{folder} has some files of {source.task}, but not its split {' and '.join(missing)}.",
            [f"{source.task}.{split}.jsonl is not there" for split in missing],
        )
    return {path.name: load_rows_file(path) for path in files.values() if path}


def _file(folder: Path, task: str, split: str) -> Path | None:
    places = (folder / f"{task}.{alias}.{ending}" for alias in _ALIASES[split] for ending in _ENDINGS)
    return next((place for place in places if place.is_file()), None)


def load_rows_file(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines, or of a CSV file with a line of names.

    Raises:
        CheckpointError: a line is no JSON object; names all such lines.
    """
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".csv":
        return [dict(row) for row in csv.DictReader(text.splitlines(keepends=True))]
    rows, problems = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                rows.append(row)
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        raise CheckpointError(f"{path} is not a file of JSON objects, one a line.", problems)
    return rows


def from_hub(source: Source) -> Mapping[str, Iterable[Mapping[str, Any]]]:
    """Rows by split, by the library `datasets`.

    Raises:
        CheckpointError: the hub cannot be reached and nothing is in its cache, or the data set is not there.
    """
    try:
        found, _ = load_splits(*source.hub, source.splits)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error.headline} Put {_wanted(source)} into the folder of --data to do without the hub.", error.problems
        ) from error
    return {split: found[split] for split in source.splits}
