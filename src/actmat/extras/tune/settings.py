"""Settings of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actmat.extras.models.layered import Placement
from actmat.extras.models.loading import Loaded
from actmat.extras.tune.evaluate import Predict, Score, default_predict
from actmat.extras.tune.live import Loader


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Settings of a search.

    Args:
        score: see `evaluate.Score`.
        minutes, budget: of the search, in minutes and in evaluations; default: until all is tried.
        least_agreement: share of its own predictions that every expert must keep in the chosen merge.
        model_class, model_dtype: of the models while they run.
        new_tokens: tokens that a generating expert adds to an input.
        predict: logits of a model, for models whose output has none; or one for
            each expert by its name, if they have heads of their own.
        load: from a location to a model, in place of `extras.models.loading.load_model`.
        average: compare the chosen merge with the average in the end.
        keep_work: keep the merges that were tried in the work folder.
    """

    score: Score = "divergence"
    minutes: float | None = None
    budget: int | None = None
    least_agreement: float = 0.0
    model_class: str | None = None
    model_dtype: str = "auto"
    new_tokens: int = 16
    predict: Predict | Mapping[str, Predict] = default_predict
    load: Callable[[str], Loaded] | None = None
    average: bool = True
    keep_work: bool = False

    def predict_of(self, label: str) -> Predict:
        """Logits for the inputs of an expert."""
        return self.predict[label] if isinstance(self.predict, Mapping) else self.predict

    def loader(self, base: str, place: Placement) -> Loader:
        """Loads the models of a search."""
        return Loader(base, self.model_class, place, self.load or dict[str, Loaded]().get)

    @property
    def score_name(self) -> str:
        """Name of the score in reports."""
        return self.score if isinstance(self.score, str) else str(getattr(self.score, "__name__", "score"))
