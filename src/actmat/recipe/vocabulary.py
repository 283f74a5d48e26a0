"""The tokens of a merged model: field of a recipe, and the plug-in that gives all inputs the rows of one vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Protocol, runtime_checkable

from pydantic import Field

from actmat import plugins
from actmat.recipe.values import Strict

if TYPE_CHECKING:
    from actmat.checkpoints.model import Model


class TokenRow(Strict):
    """The row of one token; as text, the model it is taken from."""

    TEXT = "model"

    model: str = Field(default="", description="'base' or an expert's name; default: a row of zeros")
    token: str | None = Field(default=None, description="token of that model; default: the same")
    token_id: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="row number of that token, in place of its text"
    )
    force: bool = Field(default=False, description="also for models that have the token themselves")


MOST_PADDING = 128 * 128
"""Rows: tiles of a matrix kernel times devices that a table is split among."""


class Vocabulary(Strict):
    """Tokens of the merged model; as text, only their source."""

    TEXT = "source"

    source: str = Field(default="union", description="'base', 'union', or an expert's name")
    tokens: dict[str, TokenRow] = Field(
        default_factory=dict, description="token -> its row; tokens that the source lacks are added"
    )
    pad_to_multiple_of: Annotated[int, Field(gt=0, le=MOST_PADDING)] | None = Field(
        default=None,
        description="round the number of rows up to a multiple, 16384 at most; padding rows are the mean of the others",
    )


@runtime_checkable
class AlignVocabularies(Protocol):
    """Give the base and the experts the rows of one vocabulary."""

    def __call__(
        self, base: Model, experts: Mapping[str, Model], vocabulary: Vocabulary
    ) -> tuple[Model, dict[str, Model], Collection[str]]:
        """The aligned models, and labels of those whose rows are not those that are stored, with others after them.

        Args:
            base, experts: open models, each with a `tokenizer.json`; the label of the base is 'base'.
            vocabulary: the new one.

        Raises:
            CheckpointError: the vocabularies cannot be put in one order; all problems.
        """


def vocabulary_aligner() -> AlignVocabularies:
    """The plug-in `view.vocabulary`."""
    return plugins.needed("actmat.formats", "view.vocabulary", AlignVocabularies)
