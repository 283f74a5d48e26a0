"""What a model is asked: a prompt and the answers to choose from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from actmat_experiments.harness.tasks import majority_share

__all__ = ["Item", "TextTask", "fingerprint"]


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Args:
        prompt: what the encoder reads.
        choices: the answers, distinct and not empty.
        label: position of the right one.
    """

    prompt: str
    choices: tuple[str, ...]
    label: int

    @property
    def target(self) -> str:
        """The right answer."""
        return self.choices[self.label]


@dataclass(frozen=True, slots=True)
class TextTask:
    """A task with disjoint parts: to fit, to choose settings, to report (`harness.tasks.Task`)."""

    name: str
    train: Sequence[Item] = field(repr=False)
    validation: Sequence[Item] = field(repr=False)
    test: Sequence[Item] = field(repr=False)
    metric: str = "accuracy"

    @property
    def majority(self) -> tuple[int, int]:
        """Right and all answers on the test part of a model that always chooses the most frequent position."""
        return majority_share([item.label for item in self.train], [item.label for item in self.test])

    def key(self, *parts: str) -> dict[str, str]:
        """The name, and the hash of each of these parts: what a result on them depends on."""
        return {"task": self.name, **{part: fingerprint(getattr(self, part)) for part in parts}}


def fingerprint(items: Sequence[Item]) -> str:
    """SHA-256 over all prompts, choices and labels, in order."""
    found = hashlib.sha256()
    for item in items:
        found.update(json.dumps([item.prompt, item.choices, item.label]).encode() + b"\n")
    return found.hexdigest()
