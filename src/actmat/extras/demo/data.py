"""Photographs of handwritten digits, and their split.

Shapes: `N` images, `H = W = 8` pixels. Images are float32 in [0, 1], labels int64.
Source: the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI, 1998), which
scikit-learn ships; nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.errors import MergeError

__all__ = ["SIDE", "Photographs", "Split", "load_photographs", "moved_views", "shift", "split_photographs"]

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
    """The image moved by whole pixels; what leaves is lost, what comes in is black."""
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
