"""What an experiment needs to know of a task, whatever its data are."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Protocol, runtime_checkable

__all__ = ["Task", "majority_share"]


@runtime_checkable
class Task(Protocol):
    """A named question with three disjoint parts of data: to fit, to choose settings, to report."""

    @property
    def name(self) -> str:
        """Column of the tables, name of the expert."""

    @property
    def metric(self) -> str:
        """What is reported, such as "accuracy"."""

    @property
    def train(self) -> Sized:
        """Examples to train on."""

    @property
    def validation(self) -> Sized:
        """Examples on which settings are chosen; never reported."""

    @property
    def test(self) -> Sized:
        """Examples that are reported; nothing is chosen on them."""

    @property
    def majority(self) -> tuple[int, int]:
        """Right and all answers on the test part of a model that always gives the most frequent training answer."""


def majority_share(train: Sequence[Any], test: Sequence[Any]) -> tuple[int, int]:
    """Right and all answers when every test item gets the most frequent training answer (the smallest of equals)."""
    values = sorted(set(train))
    most = max(values, key=lambda v: sum(1 for t in train if t == v))
    return sum(1 for t in test if t == most), len(test)
