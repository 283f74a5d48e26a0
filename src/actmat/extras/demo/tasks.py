"""Six tasks: a look and a question each.

Shapes: `N` images, `H = W = 8` pixels.

All start from the same photographs. A *look* changes them (negative, striped, jumbled, ...), so that the inputs of two
tasks fill different directions of every layer; a *question* gives the labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from actmat.extras.demo.data import SIDE, Photographs, Split, moved_views
from actmat.extras.demo.training import generator_for

__all__ = ["LOOKS", "QUESTIONS", "TASKS", "Examples", "Look", "Question", "Task", "TaskData", "pose", "pose_split"]

Look = Literal["plain", "negative", "chequered", "rows", "columns", "jumbled"]
Question = Literal["digit", "parity", "large", "mod3", "turned"]


@dataclass(frozen=True, slots=True)
class Examples:
    """`images_NHW` and the right answers `labels_N`."""

    images_NHW: Tensor
    labels_N: Tensor

    def __len__(self) -> int:
        return len(self.labels_N)


@dataclass(frozen=True, slots=True)
class Task:
    """One task; `name` is its column in the table and the name of its expert's folder."""

    name: str
    look: Look
    question: Question

    @property
    def n_classes(self) -> int:
        """Number of answers."""
        return QUESTIONS[self.question]


@dataclass(frozen=True, slots=True)
class TaskData:
    """One task on the three parts of the photographs."""

    train: Examples
    validation: Examples
    test: Examples


TASKS = (
    Task("digit", "plain", "digit"),
    Task("parity", "negative", "parity"),
    Task("large", "chequered", "large"),
    Task("jumbled", "jumbled", "digit"),
    Task("turned", "rows", "turned"),
    Task("mod3", "columns", "mod3"),
)

QUESTIONS: dict[Question, int] = {"digit": 10, "parity": 2, "large": 2, "mod3": 3, "turned": 4}
"""Number of answers: which digit; even or odd; below five or not; remainder by three; quarter turns to the left."""


def _inverted_where(pattern_HW: Tensor) -> Callable[[Tensor], Tensor]:
    """Negative where the pattern is 1, unchanged where it is 0."""
    return lambda images_NHW: (pattern_HW - images_NHW).abs()


def _jumble(images_NHW: Tensor) -> Tensor:
    """All pixels in an order that was drawn once: it belongs to the look, not to the seed of a run."""
    order = torch.randperm(SIDE * SIDE, generator=torch.Generator().manual_seed(SIDE * SIDE))
    return images_NHW.flatten(1)[:, order].view(-1, SIDE, SIDE)


_row_HW, _column_HW = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")

LOOKS: dict[Look, Callable[[Tensor], Tensor]] = {
    "plain": lambda images_NHW: images_NHW,
    "negative": _inverted_where(torch.ones(SIDE, SIDE)),
    "chequered": _inverted_where(((_row_HW + _column_HW) % 2).float()),
    "rows": _inverted_where((_row_HW % 2).float()),
    "columns": _inverted_where((_column_HW % 2).float()),
    "jumbled": _jumble,
}
"""Functions of a batch of images; each is one-to-one, so that no look loses what is needed to answer."""


def pose(photographs: Photographs, look: Look, question: Question, generator: torch.Generator) -> Examples:
    """Ask the question of photographs in this look. Only "turned" draws from the generator."""
    images_NHW, digits_N = photographs.images_NHW, photographs.digits_N
    if question == "turned":
        labels_N = torch.randint(4, (len(photographs),), generator=generator)
        turned = [torch.rot90(image, turns) for image, turns in zip(images_NHW, labels_N.tolist(), strict=True)]
        images_NHW = torch.stack(turned)
    else:
        labels_N = (digits_N >= 5).long() if question == "large" else digits_N % QUESTIONS[question]
    return Examples(LOOKS[look](images_NHW), labels_N)


def pose_split(task: Task, split: Split, *, n_views: int, seed: int) -> TaskData:
    """The task on all three parts; training photographs come in `n_views` views, the others as they are."""
    train = moved_views(split.train, n_views, generator_for(seed, f"views {task.name}"))

    def posed(part: str, photographs: Photographs) -> Examples:
        return pose(photographs, task.look, task.question, generator_for(seed, f"pose {task.name} {part}"))

    return TaskData(posed("train", train), posed("validation", split.validation), posed("test", split.test))
