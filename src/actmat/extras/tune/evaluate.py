"""Scores of candidates on unlabelled inputs: written into the live model, compared with every expert, journaled."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn

from actmat.errors import RecipeError, StatisticsError
from actmat.extras.tune.answers import Answers, Comparison, Predict, compare_answers
from actmat.extras.tune.inputs import ExpertInputs, InputBatch
from actmat.extras.tune.live import Directions, LiveModel
from actmat.extras.tune.space import Candidate

__all__ = ["Asked", "Evaluator", "Named", "Score", "TaskScore", "Trial", "loss_of"]

Named = Literal["divergence", "disagreement", "accuracy", "perplexity"]


@runtime_checkable
class TaskScore(Protocol):
    """A score on tasks of its own, such as benchmarks, in place of the experts' inputs."""

    __name__: str

    def losses(self, model: nn.Module, share: float) -> dict[str, float]:
        """Task -> loss, of which smaller is better, on a share of the task's questions."""


Score = Named | Callable[[nn.Module, str, Sequence[InputBatch]], float] | TaskScore
"""A score by name; or `score(model, expert, batches)`, of which larger is better; or one on tasks of its own."""


@dataclass(frozen=True)
class Asked:
    """One expert's inputs, its own predictions for them, and how a model is asked for predictions."""

    inputs: ExpertInputs
    search: Sequence[Answers]
    final: Sequence[Answers]
    predict: Predict


@dataclass(frozen=True)
class Trial:
    """One candidate on a share of the inputs.

    Args:
        losses: per expert, or per task of a `TaskScore`; smaller is better.
        agreement: per expert, share of predictions whose most probable class is the expert's.
    """

    candidate: Candidate
    share: float
    losses: Mapping[str, float]
    agreement: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Mean loss over the experts."""
        return math.fsum(self.losses.values()) / len(self.losses)

    @property
    def worst(self) -> float:
        """Loss of the expert that fares worst."""
        return max(self.losses.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "method": self.candidate.merge.method,
            "options": dict(self.candidate.merge.options),
            "weights": self.candidate.merge.weights and list(self.candidate.merge.weights),
            "scale": self.candidate.scale,
            "groups": dict(self.candidate.groups),
            "share": self.share,
            "losses": dict(self.losses),
            "agreement": dict(self.agreement),
            "mean": self.mean,
            "worst": self.worst,
        }


def loss_of(found: Comparison, score: Named, sample: Sequence[int] | None = None) -> float:
    """Loss of a candidate for one expert, over all samples or those given (which may repeat).

    Raises:
        StatisticsError: accuracy or perplexity without labels.
    """
    numbers = range(len(found.predictions)) if sample is None else sample
    counts = found.labelled if score in ("accuracy", "perplexity") else found.predictions
    total = sum(counts[n] for n in numbers)
    if not total:
        raise StatisticsError(f"The score '{score}' needs labels, and none of the inputs has one (--label-column).")
    values: Sequence[float] = {
        "divergence": found.divergence, "disagreement": found.differing, "perplexity": found.surprise,
        "accuracy": found.right,
    }[score]  # fmt: skip
    mean = math.fsum(values[n] for n in numbers) / total
    return 1.0 - mean if score == "accuracy" else mean


class Evaluator:
    """Evaluates candidates; trials of an earlier run are read from the journal.

    Args:
        live: the base's model.
        directions: of the merges.
        asked: per expert.
        score: the function to minimise.
        journal: file of finished trials.
        mark: of everything that a loss depends on besides the candidate; trials of another mark are not used.
    """

    def __init__(
        self,
        live: LiveModel,
        directions: Directions,
        asked: Mapping[str, Asked],
        score: Score,
        journal: Path,
        *,
        mark: str = "",
    ) -> None:
        self._live, self._directions, self._asked = live, directions, asked
        self._score = score
        self._journal, self._mark = journal, mark
        self._done = _read_journal(journal)

    def trial(self, candidate: Candidate, share: float) -> Trial:
        """Losses of a candidate on the first `share` of the inputs."""
        key = f"{self._mark} {share:g} {candidate.key}"
        if (entry := self._done.get(key)) is None:
            self.write(candidate)
            losses, agreement = self._measure(share)
            entry = {"key": key, "losses": losses, "agreement": agreement}
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            self._done[key] = entry
        return Trial(candidate, share, entry["losses"], entry["agreement"])

    def _measure(self, share: float) -> tuple[dict[str, float], dict[str, float]]:
        """Losses and agreement of the live model."""
        losses, agreement = {}, {}
        for label, asked in self._asked.items():
            batches = asked.inputs.taken(share)
            found = compare_answers(self._live.model, batches, asked.search, asked.predict)
            agreement[label] = 1.0 - loss_of(found, "disagreement")
            if isinstance(self._score, str):
                losses[label] = loss_of(found, self._score)
            elif not isinstance(self._score, TaskScore):
                losses[label] = -_finite(float(self._score(self._live.model, label, batches)), label)
        if isinstance(self._score, TaskScore):
            losses = {t: _finite(v, t) for t, v in self._score.losses(self._live.model, share).items()}
        return losses, agreement

    def write(self, candidate: Candidate) -> None:
        """Make the live model the candidate."""
        self._live.write(self._directions.of(candidate.merge), candidate.factor)

    def final(self, candidate: Candidate | None) -> dict[str, Comparison]:
        """Comparison with every expert on the inputs that were kept for the end; None: of the base."""
        if candidate is None:
            self._live.restore()
        else:
            self.write(candidate)
        return {
            label: compare_answers(self._live.model, a.inputs.final, a.final, a.predict)
            for label, a in self._asked.items()
        }


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise RecipeError(f"The score function gave {value} for '{name}'; expected a finite number.")
    return value


def _read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Finished trials; a line that was cut off is left out."""
    done: dict[str, dict[str, Any]] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
                done[str(entry["key"])] = entry
            except (ValueError, KeyError, TypeError):
                continue
    return done
