"""Text files, byte for byte, from their originals. Rows are JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from actmat.errors import CheckpointError
from benchmarks.data.originals import Original

Recipe = Callable[[Original], bytes]
_WINOGRANDE = re.compile(
    r"Please choose the correct answer to fill in the blank to complete the given sentence: (.*)\n\n"
    r"Option1: (.*) Option2: (.*) Answer format: option1/option2",
    re.DOTALL,
)
_ANSWER_TOKENS = 40


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def copied(path: str) -> Recipe:
    """The file as it is."""
    return lambda original: original.file(path)


def labeled(path: str, rows: slice | None = None) -> Recipe:
    """Lines `LABEL TEXT`.

    Args:
        rows: these of a permutation by `default_rng(0)`, in the order of the file; default: all.
    """

    def make(original: Original) -> bytes:
        lines = [line for line in original.file(path).decode("latin-1").split("\n") if line.strip()]
        found = [{"text": text.strip(), "label": int(label)} for label, _, text in (x.partition(" ") for x in lines)]
        return _lines(found if rows is None else _drawn(found, rows))

    return make


def instances(path: str, rows: slice | None = None) -> Recipe:
    """A list of sentences with labels, or some of them as in `labeled`."""

    def make(original: Original) -> bytes:
        found = [{"text": x["sentence"], "label": x["label"]} for x in json.loads(original.file(path))]
        return _lines(found if rows is None else _drawn(found, rows))

    return make


def _drawn(found: list[dict[str, Any]], rows: slice) -> list[dict[str, Any]]:
    return [found[i] for i in sorted(np.random.default_rng(0).permutation(len(found))[rows])]


def qasc(path: str) -> Recipe:
    """Questions with eight choices and two facts."""

    def make(original: Original) -> bytes:
        rows = [json.loads(line) for line in original.file(path).decode().splitlines()]
        return _lines(
            {
                "id": row["id"],
                "question": row["question"]["stem"],
                "choices": {choice["label"]: choice["text"] for choice in row["question"]["choices"]},
                "label": row["answerKey"],
                "fact1": row["fact1"],
                "fact2": row["fact2"],
            }
            for row in rows
        )

    return make


def winogrande(path: str) -> Recipe:
    """Sentences and options without the instruction around them.

    Raises:
        CheckpointError: an instruction has another form.
    """

    def make(original: Original) -> bytes:
        found = []
        for row in json.loads(original.file(path)):
            if (match := _WINOGRANDE.fullmatch(row["instruction"])) is None:
                raise CheckpointError(f"{path} of {original.repo} has an unexpected instruction: {row['instruction']}")
            found.append({"sentence": match[1], "option1": match[2], "option2": match[3], "label": row["answer"]})
        return _lines(found)

    return make


def wikiqa(folder: str) -> Recipe:
    """Tokenized questions and answers of 40 tokens at most; questions without a right answer are left out."""

    def make(original: Original) -> bytes:
        columns = (
            original.file(f"{folder}/{n}").decode().split("\n") for n in ("id.txt", "a.toks", "b.toks", "sim.txt")
        )
        rows = [
            {
                "qid": qid.strip(),
                "question": question.strip(),
                "sentence": " ".join(sentence.split()[:_ANSWER_TOKENS]),
                "label": int(label),
            }
            for qid, question, sentence, label in zip(*columns, strict=False)
            if qid.strip()
        ]
        answered = {row["qid"] for row in rows if row["label"]}
        return _lines(row for row in rows if row["qid"] in answered)

    return make
