"""Photographs of handwritten digits, their split, and six tasks on them: a look and a question each.

Shapes: `N` images, `H = W = 8` pixels. Images are float32 in [0, 1], labels int64.
Source: the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI, 1998), which
scikit-learn ships; nothing is downloaded.

All tasks start from the same photographs. A *look* changes them (negative, striped, jumbled, ...), so that the inputs
of two tasks fill different directions of every layer; a *question* gives the labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from actmat.errors import MergeError
from actmat.extras.demo.training import generator_for

SIDE = 8
_WHITE = 16.0


@dataclass(frozen=True, slots=True)
class Photographs:
    """Digits as they were written: `images_NHW` in [0, 1], white on black, and `digits_N` in 0..9."""

    images_NHW: Tensor
    digits_N: Tensor

    def __len__(self) -> int:
        return len(self.digits_N)

    def take(self, index_N: Tensor) -> Photographs:
        """The photographs at these positions."""
        return Photographs(self.images_NHW[index_N], self.digits_N[index_N])


@dataclass(frozen=True, slots=True)
class Split:
    """Three disjoint parts: to fit, to choose settings, to report."""

    train: Photographs
    validation: Photographs
    test: Photographs


def load_photographs() -> Photographs:
    """All 1797 photographs.

    Raises:
        MergeError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise MergeError(
            "The demo takes its photographs from scikit-learn, which is not installed here. "
            "Install it with: pip install 'actmat[demo]'"
        ) from error
    found = datasets.load_digits()
    return Photographs(torch.from_numpy(found.images).float() / _WHITE, torch.from_numpy(found.target).long())


def split_photographs(photographs: Photographs, *, n_validation: int, n_test: int, generator: torch.Generator) -> Split:
    """Cut at random into `n_test` and `n_validation` photographs, and all others to train on.

    The cut comes before the tasks, so that no expert has seen, in any look, a photograph that another is tested on.

    Raises:
        ValueError: nothing would be left to train on.
    """
    n_held = n_validation + n_test
    if not 0 < n_held < len(photographs):
        raise ValueError(f"cannot hold out {n_held} of {len(photographs)} photographs")
    order_N = torch.randperm(len(photographs), generator=generator)
    return Split(*(photographs.take(part) for part in (order_N[n_held:], order_N[n_test:n_held], order_N[:n_test])))


def shift(image_HW: Tensor, down: int, right: int) -> Tensor:
    """The image moved by whole pixels; pixels that leave are lost, new ones are black."""
    height, width = image_HW.shape
    padded_HW = torch.nn.functional.pad(image_HW, (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)))
    return padded_HW[max(-down, 0) :, max(-right, 0) :][:height, :width]


def moved_views(photographs: Photographs, n_views: int, generator: torch.Generator) -> Photographs:
    """The photographs, and `n_views - 1` further copies, each moved by -1, 0 or 1 pixel down and right."""
    views_NHW = [photographs.images_NHW]
    for _ in range(n_views - 1):
        steps_N2 = torch.randint(-1, 2, (len(photographs), 2), generator=generator).tolist()
        moved = [shift(image, down, right) for image, (down, right) in zip(views_NHW[0], steps_N2, strict=True)]
        views_NHW.append(torch.stack(moved))
    return Photographs(torch.cat(views_NHW), photographs.digits_N.repeat(n_views))


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
    """A function that makes pixels negative if the pattern is 1 there."""
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
"""Functions of a batch of images; each is one-to-one, so that no look loses information."""


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
