"""The choice of a vocabulary as plain data, for recipes and for the code that carries it out; imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from actmat import plugins

if TYPE_CHECKING:
    from actmat.checkpoints.model import Model


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
    """Give the base and the experts the rows of one vocabulary."""

    def __call__(
        self, base: Model, experts: Mapping[str, Model], policy: VocabularyPolicy
    ) -> tuple[Model, dict[str, Model], Collection[str]]:
        """The aligned models, and labels of those whose rows are not those that are stored, with others after them.

        Args:
            base, experts: open models, each with a `tokenizer.json`; the label of the base is 'base'.
            policy: the new vocabulary.

        Raises:
            CheckpointError: the vocabularies cannot be put in one order; all problems.
        """


def vocabulary_aligner() -> AlignVocabularies:
    """The plug-in `view.vocabulary`."""
    return plugins.needed("actmat.formats", "view.vocabulary", AlignVocabularies)
