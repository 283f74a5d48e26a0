"""What a model knows: the accuracy on a part of a task, and how it is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actmat_experiments.language.items import TextTask
from actmat_experiments.language.rank import chosen
from actmat_experiments.language.tokens import Encoded, encode

__all__ = ["Counts", "Exam", "counts", "examine", "make_exams"]

Counts = Mapping[str, float]
"""`correct`, `total`, and `balanced`: the mean over right answers' positions of the share that is answered rightly."""


@dataclass(frozen=True, slots=True)
class Exam:
    """A task in token ids.

    Args:
        task: where the items come from.
        train: items to fit.
        validation: items on which settings are chosen.
        test: items that are reported.
        max_length: tokens of a prompt.
    """

    task: TextTask
    train: Sequence[Encoded] = field(repr=False)
    validation: Sequence[Encoded] = field(repr=False)
    test: Sequence[Encoded] = field(repr=False)
    max_length: int

    @property
    def name(self) -> str:
        """The task's."""
        return self.task.name

    def key(self, *parts: str) -> dict[str, Any]:
        """What a result on these parts depends on."""
        return {**self.task.key(*parts), "max_length": self.max_length}


def make_exams(tokenizer: Any, tasks: Sequence[TextTask], *, max_length: int) -> dict[str, Exam]:
    """Name -> the task in token ids."""
    found = {}
    for task in tasks:
        parts = (encode(tokenizer, part, max_length=max_length) for part in (task.train, task.validation, task.test))
        train, validation, test = parts
        found[task.name] = Exam(task, train, validation, test, max_length)
    return found


def examine(model: Any, items: Sequence[Encoded], on_items: Callable[[int], object] = lambda n: None) -> Counts:
    """Rank classification of all items."""
    return counts(chosen(model, items, on_batch=on_items), torch.tensor([item.label for item in items]))


def counts(chosen_N: Tensor, labels_N: Tensor) -> Counts:
    """How many of the choices are right.

    `balanced` weighs every position of the right answer equally: where nine of ten answers are "no", a model that
    always says so is right nine times of ten, and its balanced share is a half.
    """
    right_N = chosen_N == labels_N
    shares = [float(right_N[labels_N == label].double().mean()) for label in sorted(set(labels_N.tolist()))]
    return {"correct": float(right_N.sum()), "total": len(right_N), "balanced": sum(shares) / len(shares)}
