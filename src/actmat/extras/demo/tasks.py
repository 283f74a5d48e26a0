"""Photographs of handwritten digits, their split, and six tasks: each has a look and a question.

Shapes: `N` images, `H = W = 8` pixels. Images are float32 in [0, 1], white on black; labels int64.
Source: the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI, 1998), which
scikit-learn contains; nothing is downloaded.

All tasks use the same photographs. A *look* transforms them (negative, striped, jumbled, ...), so that the inputs of
two tasks span different directions in every layer; a *question* gives the labels.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.errors import MergeError

SIDE = 8
WHITE = 16
"""The brightest pixel of a photograph."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Images `images_NHW` and their labels `labels_N`."""

    images_NHW: Tensor
    labels_N: Tensor

    def __len__(self) -> int:
        return len(self.labels_N)

    def take(self, index_N: Tensor) -> Examples:
        """The examples at these positions."""
        return Examples(self.images_NHW[index_N], self.labels_N[index_N])


@dataclass(frozen=True, slots=True)
class Split:
    """Disjoint parts for training, choosing settings, and reporting."""

    train: Examples
    validation: Examples
    test: Examples


@dataclass(frozen=True, slots=True)
class DigitTask:
    """One task; `name` is its column in the table and the name of its expert's folder.

    Args:
        question: which digit; even or odd; five or more; remainder by three; quarter turns to the left.
    """

    name: str
    look: str
    question: str
    n_classes: int


TASKS = (
    DigitTask("digit", "plain", "digit", 10),
    DigitTask("parity", "negative", "parity", 2),
    DigitTask("large", "checkered", "large", 2),
    DigitTask("jumbled", "jumbled", "digit", 10),
    DigitTask("turned", "rows", "turned", 4),
    DigitTask("mod3", "columns", "mod3", 3),
)


def _inverted_where(pattern_HW: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that inverts pixels where the pattern is 1."""
    return lambda images_NHW: (pattern_HW - images_NHW).abs()


def _jumble(images_NHW: Tensor) -> Tensor:
    """Permute the pixels in a fixed order that does not depend on the run's seed."""
    order = torch.randperm(SIDE * SIDE, generator=torch.Generator().manual_seed(SIDE * SIDE))
    return images_NHW.flatten(1)[:, order].view(-1, SIDE, SIDE)


_row_HW, _column_HW = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")

LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda images_NHW: images_NHW,
    "negative": _inverted_where(torch.ones(SIDE, SIDE)),
    "checkered": _inverted_where(((_row_HW + _column_HW) % 2).float()),
    "rows": _inverted_where((_row_HW % 2).float()),
    "columns": _inverted_where((_column_HW % 2).float()),
    "jumbled": _jumble,
}
"""Look -> function of a batch of images; each is invertible, so that no information is lost."""


def generator_for(seed: int, purpose: str) -> torch.Generator:
    """A separate generator per purpose, so that a new draw does not change others."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{purpose}".encode()))


def load_photographs() -> Examples:
    """All 1797 photographs with their digits.

    Raises:
        MergeError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise MergeError(
            "The demo reads its photographs from scikit-learn, which is not installed. Fix: pip install 'actmat[demo]'"
        ) from error
    digits = datasets.load_digits()
    return Examples(torch.from_numpy(digits.images).float() / WHITE, torch.from_numpy(digits.target).long())


def split_photographs(n_validation: int, n_test: int, generator: torch.Generator) -> Split:
    """Split the photographs at random into `n_test`, `n_validation`, and the rest for training.

    The split precedes the tasks, so that no expert was trained, in any look, on a test photograph of another.

    Raises:
        MergeError: scikit-learn is missing.
    """
    photographs, n_held = load_photographs(), n_validation + n_test
    order_N = torch.randperm(len(photographs), generator=generator)
    return Split(*map(photographs.take, (order_N[n_held:], order_N[n_test:n_held], order_N[:n_test])))


def shift(image_HW: Tensor, down: int, right: int) -> Tensor:
    """Shift the image by whole pixels; new pixels are black."""
    height, width = image_HW.shape
    padded_HW = torch.nn.functional.pad(image_HW, (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)))
    return padded_HW[max(-down, 0) :, max(-right, 0) :][:height, :width]


def moved_views(photographs: Examples, n_views: int, generator: torch.Generator) -> Examples:
    """The photographs and `n_views - 1` copies, each shifted by -1, 0 or 1 pixel down and right."""
    views_NHW = [photographs.images_NHW]
    for _ in range(n_views - 1):
        steps_N2 = torch.randint(-1, 2, (len(photographs), 2), generator=generator).tolist()
        moved = [shift(image, down, right) for image, (down, right) in zip(views_NHW[0], steps_N2, strict=True)]
        views_NHW.append(torch.stack(moved))
    return Examples(torch.cat(views_NHW), photographs.labels_N.repeat(n_views))


def pose(photographs: Examples, look: str, question: str, generator: torch.Generator) -> Examples:
    """Apply the look and label by the question. Only "turned" uses the generator."""
    images_NHW, digits_N = photographs.images_NHW, photographs.labels_N
    if question == "turned":
        labels_N = torch.randint(4, (len(photographs),), generator=generator)
        turned = [torch.rot90(image, turns) for image, turns in zip(images_NHW, labels_N.tolist(), strict=True)]
        return Examples(LOOKS[look](torch.stack(turned)), labels_N)
    labels = {"digit": digits_N, "parity": digits_N % 2, "large": (digits_N >= 5).long(), "mod3": digits_N % 3}
    return Examples(LOOKS[look](images_NHW), labels[question])


def pose_split(task: DigitTask, split: Split, *, n_views: int, seed: int) -> Split:
    """The task on all three parts; training photographs have `n_views` views, the others one."""
    train = moved_views(split.train, n_views, generator_for(seed, f"views {task.name}"))
    parts = (("train", train), ("validation", split.validation), ("test", split.test))
    draws = {name: generator_for(seed, f"pose {task.name} {name}") for name, _ in parts}
    return Split(*(pose(part, task.look, task.question, draws[name]) for name, part in parts))
