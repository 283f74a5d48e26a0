"""The tokens of the merged model, as a recipe says them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from actmat.experts.policy import TokenSource, VocabularyPolicy
from actmat.recipe.values import Strict

__all__ = ["TokenRow", "Vocabulary"]


class TokenRow(Strict):
    """The row of one token; as text, the model it is taken from."""

    model: str = Field(default="", description="'base' or an expert's name; default: a row of zeros")
    token: str | None = Field(default=None, description="token of that model; default: the same")
    token_id: Annotated[int, Field(ge=0)] | None = Field(default=None, description="or the number of its row")
    force: bool = Field(default=False, description="also for models that have the token; default: only for others")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value


class Vocabulary(Strict):
    """Tokens of the merged model; as text, only their source."""

    source: str = Field(default="union", description="'base', 'union', or an expert's name")
    tokens: dict[str, TokenRow] = Field(
        default_factory=dict, description="token -> its row; tokens that the source lacks are added"
    )
    pad_to_multiple_of: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="round the number of rows up; more padding is the mean of a table's other rows"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    def policy(self) -> VocabularyPolicy:
        """The same for the code that carries it out."""
        rows = {t: TokenSource(**row.model_dump()) for t, row in self.tokens.items()}
        return VocabularyPolicy(self.source, rows, self.pad_to_multiple_of)
