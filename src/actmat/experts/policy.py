"""The choice of a vocabulary as plain data, for recipes and for the code that carries it out; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from actmat import plugins

if TYPE_CHECKING:
    from actmat.checkpoints.base import Checkpoint


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Row of one token: that of `token` (default: itself) or of number `token_id` in `model`; zeros without a model."""

    model: str = ""  # 'base' or the name of an expert
    token: str | None = None
    token_id: int | None = None
    force: bool = False  # also for inputs that have the token


@dataclass(frozen=True, slots=True)
class VocabularyPolicy:
    """The new vocabulary: `base`, `union` or the name of an expert; rows of single tokens; rounding of the size."""

    source: str
    tokens: Mapping[str, TokenSource] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None


@runtime_checkable
class AlignVocabularies(Protocol):
    """The base and the experts with the rows of one vocabulary."""

    def __call__(
        self, base: Checkpoint, experts: Mapping[str, Checkpoint], policy: VocabularyPolicy
    ) -> tuple[Checkpoint, dict[str, Checkpoint]]:
        """The aligned checkpoints.

        Args:
            base, experts: open full checkpoints, each with a `tokenizer.json`.
            policy: the new vocabulary.

        Raises:
            CheckpointError: the vocabularies cannot be put in one order; all problems.
        """


def vocabulary_aligner() -> AlignVocabularies:
    """The plug-in `view.vocabulary`."""
    return plugins.needed("actmat.formats", "view.vocabulary", AlignVocabularies)
