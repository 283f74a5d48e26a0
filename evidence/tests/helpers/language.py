"""Small inputs for the tests of the language experiments: rows as the hub has them, a tiny T5, a tiny data folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from actmat_experiments.language.exams import Encoded
from actmat_experiments.language.small.pretrain import Architecture, new_model, train_tokenizer
from actmat_experiments.language.small.tasks import SMALL_TASKS

TINY = Architecture(vocabulary=300, d_model=16, d_kv=8, d_ff=24, heads=2, layers=2)

HUB_ROWS: dict[str, dict[str, Any]] = {
    "qasc": {
        "id": "q1",
        "question": "What melts?",
        "choices": {"text": ["iron", "ice", "sand", "wood", "wool", "salt", "soil", "air"], "label": list("ABCDEFGH")},
        "answerKey": "B",
        "fact1": "Frozen water is ice.",
        "fact2": "Heat melts frozen water.",
        "combinedfact": "Heat melts ice.",
        "formatted_question": "What melts? (A) iron (B) ice ...",
    },
    "wikiqa": {
        "question_id": "Q0",
        "question": "how are glacier caves formed?",
        "document_title": "Glacier cave",
        "answer": "A glacier cave is a cave formed within the ice of a glacier .",
        "label": 1,
    },
    "quartz": {
        "id": "QRQA-1",
        "answerKey": "A",
        "choices": {"text": ["more", "less"], "label": ["A", "B"]},
        "para": "The bigger a star, the more light it gives.",
        "para_anno": {"effect_prop": "light"},
        "question": "A bigger star gives how much light?",
        "question_anno": {"less_cause_prop": ""},
    },
    "paws": {"id": 1, "sentence1": "He sold the car to her.", "sentence2": "She sold him the car.", "label": 0},
    "story_cloze": {
        "story_id": "s1",
        "input_sentence_1": "Tom was hungry.",
        "input_sentence_2": "He went to the kitchen.",
        "input_sentence_3": "There was bread.",
        "input_sentence_4": "He cut a slice.",
        "sentence_quiz1": "Tom went to sleep hungry.",
        "sentence_quiz2": "Tom ate the slice.",
        "answer_right_ending": 2,
    },
    "winogrande": {
        "sentence": "The trophy did not fit the case because the _ was too big.",
        "option1": "trophy",
        "option2": "case",
        "answer": "1",
    },
    "wsc": {
        "text": "Mark told Pete many lies, which Pete included in his book.",
        "span1_index": 0,
        "span2_index": 10,
        "span1_text": "Mark",
        "span2_text": "his",
        "idx": 0,
        "label": 0,
    },
}
"""One row per task with the columns of the data set on the hub; the texts are ours."""


TEXT_OF = {
    "qasc": "question",
    "wikiqa": "question",
    "quartz": "question",
    "paws": "sentence1",
    "story_cloze": "input_sentence_1",
    "winogrande": "sentence",
    "wsc": "text",
}
"""Task -> column of the text that tells rows apart."""


def numbered(task: str, split: str, n: int = 40) -> list[dict]:
    """Rows of the hub's schema that can be told apart."""
    column = TEXT_OF[task]
    return [{**HUB_ROWS[task], column: f"{HUB_ROWS[task][column]} {split} {k}"} for k in range(n)]


def tiny_model(seed: int = 0) -> Any:
    """A T5 of two layers with random weights, in eval mode."""
    return new_model(TINY, seed=seed).eval()


def some_items(n: int = 24, seed: int = 0) -> list[Encoded]:
    """Random prompts of 3 to 9 tokens; the first token tells the answer, one of two of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(n):
        label = int(torch.randint(2, (), generator=generator))
        length = int(torch.randint(3, 10, (), generator=generator))
        noise = torch.randint(40, 280, (length - 2,), generator=generator).tolist()
        items.append(Encoded((10 + label, *noise, 1), ((20, 1), (21, 22, 1)), label))
    return items


def written_tokenizer(folder: Path) -> Path:
    """A tokenizer of 300 tokens."""
    train_tokenizer([f"the {word} of tests number {n}" for n, word in enumerate("abcdef")], 300, folder)
    return folder


def write_small_data(folder: Path, n_train: int = 40, n_test: int = 12) -> Path:
    """All files of `language-small`; the first word of a text decides its label."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in SMALL_TASKS:
        labels = list(task.answers)
        for part, n in (("train", n_train), ("test", n_test)):
            rows = (
                {"text": f"word{k % len(labels)} of {task.name} {part} {k}", "label": labels[k % len(labels)]}
                for k in range(n)
            )
            write_rows(folder / f"{task.file}.{part}.jsonl", rows)
    return folder


def write_rows(path: Path, rows: Iterator[Mapping[str, Any]] | list[Mapping[str, Any]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
