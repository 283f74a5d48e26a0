"""Scores of candidates on unlabeled inputs: written into the live model, compared with every expert, journaled.

An expert's predictions are kept while many candidates are compared with them. Of many classes (the vocabulary of a
language model) the `top` most probable ones are kept and the rest as one class: the divergence over these is at most
the one over all classes, and the memory is bounded.

Shapes: `P` predictions, `C` classes, `K` classes kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from actmat.bounds import parse_json
from actmat.checkpoints.writing.staging import disk_errors
from actmat.errors import RecipeError, StatisticsError
from actmat.extras.collect.batches import call_model
from actmat.extras.tune.inputs import ExpertInputs, InputBatch
from actmat.extras.tune.live import Live
from actmat.extras.tune.merges import Merges
from actmat.extras.tune.space import TuneCandidate

Predict = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
"""`predict(model, batch)`: logits `* C` of a model for the keyword arguments of a batch."""

IMPOSSIBLE = 1e4
"""Nats of a class that a model does not have, or to which it gives no probability at all."""
TOP = 64
"""Classes that are kept of a prediction."""


@dataclass(frozen=True)
class Answers:
    """Predictions of an expert for one batch: log-probabilities of some classes, and of all others together.

    Args:
        log_p_PK: float32.
        classes_PK: which classes; None: all of them.
        log_rest_P: log-probability of the others; -inf where there are none.
        best_P: most probable class.
    """

    log_p_PK: Tensor
    classes_PK: Tensor | None
    log_rest_P: Tensor
    best_P: Tensor


@dataclass(frozen=True)
class AnswerComparison:
    """Sums over the predictions of each sample; of a candidate for one expert.

    Args:
        divergence: sum of `KL(expert || merged)` in nats.
        differing: number of predictions whose most probable class differs.
        right, labeled: predictions that agree with the labels, and that have one.
        surprise: sum of the negative log-probabilities of the labels.
        predictions: how many there are.
    """

    divergence: tuple[float, ...] = ()
    differing: tuple[int, ...] = ()
    right: tuple[int, ...] = ()
    labeled: tuple[int, ...] = ()
    surprise: tuple[float, ...] = ()
    predictions: tuple[int, ...] = ()

    def __add__(self, other: AnswerComparison) -> AnswerComparison:
        """The samples of both."""
        return AnswerComparison(*(getattr(self, n) + getattr(other, n) for n in AnswerComparison.__dataclass_fields__))


def default_predict(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits of a transformers model, or the tensor that a module returns."""
    output: Any = call_model(model, batch)
    logits = getattr(output, "logits", getattr(output, "logits_per_image", output))
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        raise StatisticsError(
            f"{type(model).__name__} returns {type(output).__name__}, which has no logits. From Python, pass "
            "predict=, a function of the model and a batch that returns logits."
        )
    return logits


def keep_answers(
    model: nn.Module, batches: Sequence[InputBatch], predict: Predict = default_predict, top: int = TOP
) -> list[Answers]:
    """Predictions of an expert for its own inputs.

    Raises:
        StatisticsError: a prediction that is not finite.
    """
    predicted = []
    with torch.no_grad():
        for batch in batches:
            logits_PC, _ = _counted(predict(model, batch.keywords), batch)
            log_p_PC = logits_PC.float().log_softmax(-1)
            if not bool(torch.isfinite(log_p_PC.sum())) and bool(log_p_PC.isnan().any()):
                raise StatisticsError(
                    "A prediction of the expert is NaN: check its weights, or use another --set model_dtype."
                )
            classes: Tensor | None = None
            some_PK, rest = log_p_PC, torch.full_like(log_p_PC[:, 0], -torch.inf)
            if log_p_PC.shape[-1] > 2 * top:
                some_PK, classes = log_p_PC.topk(top, dim=-1)
                rest = _log_rest(some_PK)
            predicted.append(Answers(some_PK.clone(), classes, rest, log_p_PC.argmax(-1)))
    return predicted


def compare_answers(
    model: nn.Module, batches: Sequence[InputBatch], answers: Sequence[Answers], predict: Predict = default_predict
) -> AnswerComparison:
    """Compare a candidate with an expert, on the expert's inputs.

    Raises:
        StatisticsError: predictions of another shape than the expert's.
    """
    rows: dict[str, list[float]] = {k: [] for k in AnswerComparison.__dataclass_fields__}
    with torch.no_grad():
        for batch, expert in zip(batches, answers, strict=False):
            logits_PC, sample_P = _counted(predict(model, batch.keywords), batch)
            if len(logits_PC) != len(expert.log_p_PK):
                raise StatisticsError(
                    f"The merged model makes {len(logits_PC)} predictions where the expert makes "
                    f"{len(expert.log_p_PK)}: they must answer the same question."
                )
            log_q_PC = logits_PC.float().log_softmax(-1).nan_to_num(nan=-IMPOSSIBLE, neginf=-IMPOSSIBLE)
            for name, value_P in _values(log_q_PC, expert, batch).items():
                sums = torch.zeros(batch.samples, dtype=torch.float64, device=value_P.device)
                rows[name] += sums.index_add_(0, sample_P, value_P.double()).tolist()
    whole = ("differing", "right", "labeled", "predictions")
    values: dict[str, Any] = {k: tuple(map(int, v) if k in whole else v) for k, v in rows.items()}
    return AnswerComparison(**values)


def own_right(batches: Sequence[InputBatch], answers: Sequence[Answers]) -> float | None:
    """Share of the samples with labels of which all labeled predictions are right; None without labels."""
    right_samples: list[bool] = []
    for batch, predicted in zip(batches, answers, strict=True):
        if batch.labels is not None:
            counted = torch.ones_like(batch.labels, dtype=torch.bool) if batch.counted is None else batch.counted
            has = (counted & (batch.labels != -100)).view(batch.samples, -1)
            right = batch.labels == batch.labels.masked_scatter(counted, predicted.best_P)
            right_samples += (right.view(batch.samples, -1) | ~has).all(1)[has.any(1)].tolist()
    return sum(right_samples) / len(right_samples) if right_samples else None


def _values(log_q_PC: Tensor, expert: Answers, batch: InputBatch) -> dict[str, Tensor]:
    """A value per prediction for each field of `AnswerComparison`."""
    best_P = log_q_PC.argmax(-1)
    known_P = torch.full_like(best_P, -100)
    if batch.labels is not None:
        known_P = batch.labels[batch.counted] if batch.counted is not None else batch.labels.reshape(-1)
    has_P = known_P != -100
    n_classes = log_q_PC.shape[-1]
    of_label_P = -log_q_PC.gather(-1, known_P.clamp(0, n_classes - 1)[:, None])[:, 0]
    of_label_P = of_label_P.masked_fill(known_P >= n_classes, IMPOSSIBLE)
    return {
        "divergence": divergence_of(log_q_PC, expert),
        "differing": best_P != expert.best_P,
        "right": (best_P == known_P) & has_P,
        "labeled": has_P,
        "surprise": torch.where(has_P, of_label_P, torch.zeros_like(of_label_P)),
        "predictions": torch.ones_like(best_P),
    }


def divergence_of(log_q_PC: Tensor, expert: Answers) -> Tensor:
    """`sum_k p_k log(p_k / q_k) + p_rest log(p_rest / q_rest)` per prediction, in nats.

    >>> log_p = torch.tensor([[0.5, 0.5]]).log()
    >>> same = Answers(log_p, None, torch.tensor([-torch.inf]), torch.tensor([0]))
    >>> divergence_of(torch.tensor([[0.25, 0.75]]).log(), same)  # log(2) / 2 + log(2 / 3) / 2
    tensor([0.1438])
    """
    log_q_PK = log_q_PC if expert.classes_PK is None else log_q_PC.gather(-1, expert.classes_PK)
    found_P = (expert.log_p_PK.exp() * (expert.log_p_PK - log_q_PK)).nan_to_num(nan=0.0).sum(-1)
    if expert.classes_PK is not None:
        found_P = found_P + expert.log_rest_P.exp() * (expert.log_rest_P - _log_rest(log_q_PK))
    return found_P.clamp(min=0)


def _log_rest(log_p_PK: Tensor) -> Tensor:
    """Log of what the probabilities leave of 1, at least 1e-7 of it."""
    return torch.log1p(-log_p_PK.double().exp().sum(-1).clamp(max=1 - 1e-7)).to(log_p_PK.dtype)


def _counted(logits: Tensor, batch: InputBatch) -> tuple[Tensor, Tensor]:
    """Logits `P C` of the predictions that count, and the sample of each."""
    leading = logits.shape[:-1]
    sample = torch.arange(leading[0], device=logits.device).view(-1, *(1,) * (len(leading) - 1)).expand(leading)
    if batch.counted is None:
        return logits.reshape(-1, logits.shape[-1]), sample.reshape(-1)
    if batch.counted.shape != leading:
        raise StatisticsError(
            f"The inputs have the shape {tuple(batch.counted.shape)}, the predictions {tuple(leading)}: predict= gives "
            "logits at every token of a language model's input, of which those of the continuation count."
        )
    return logits[batch.counted], sample[batch.counted]


ScoreName = Literal["divergence", "disagreement", "accuracy", "perplexity"]


@runtime_checkable
class TaskScore(Protocol):
    """A score on tasks of its own, such as benchmarks, in place of the experts' inputs."""

    __name__: str

    def losses(self, model: nn.Module) -> dict[str, float]:
        """Task -> loss, of which smaller is better."""


Score = ScoreName | Callable[[nn.Module, str, Sequence[InputBatch]], float] | TaskScore
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
    """One candidate on the inputs of the search.

    Args:
        losses: per expert, or per task of a `TaskScore`; smaller is better.
        agreement: per expert, share of predictions whose most probable class is the expert's.
    """

    candidate: TuneCandidate
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
        return asdict(self.candidate.merge) | {
            "scale": self.candidate.scale,
            "losses": dict(self.losses),
            "agreement": dict(self.agreement),
            "mean": self.mean,
            "worst": self.worst,
        }


def counts_of(comparison: AnswerComparison, score: ScoreName) -> tuple[int, ...]:
    """Predictions of each sample that count for a score: those with a label, or all."""
    return comparison.labeled if score in ("accuracy", "perplexity") else comparison.predictions


def loss_of(comparison: AnswerComparison, score: ScoreName, sample: Sequence[int] | None = None) -> float:
    """Loss of a candidate for one expert, over all samples or those given (which may repeat).

    Raises:
        StatisticsError: accuracy or perplexity without labels.
    """
    counts = counts_of(comparison, score)
    numbers = range(len(counts)) if sample is None else sample
    total = sum(counts[n] for n in numbers)
    if not total:
        raise StatisticsError(
            f"The score '{score}' needs labels, but the inputs have none. Fix: --set label_column=NAME."
        )
    values: Sequence[float] = {
        "divergence": comparison.divergence, "disagreement": comparison.differing, "perplexity": comparison.surprise,
        "accuracy": comparison.right,
    }[score]  # fmt: skip
    mean = math.fsum(values[n] for n in numbers) / total
    return 1.0 - mean if score == "accuracy" else mean


class Evaluator:
    """Evaluates candidates; trials of an earlier run are read from the journal.

    Args:
        live: the model.
        merges: the merges at scale 1.
        asked: per expert.
        score: the function to minimize.
        journal: file of finished trials.
        mark: of everything that a loss depends on besides the candidate; trials of another mark are not used.
    """

    def __init__(
        self, live: Live, merges: Merges, asked: Mapping[str, Asked], score: Score, journal: Path, *, mark: str = ""
    ) -> None:
        self._live, self._merges, self._asked = live, merges, asked
        self._score = score
        self._journal, self._mark = journal, mark
        self._done = _read_journal(journal)
        self._taken = ""

    def trial(self, candidate: TuneCandidate) -> Trial:
        """Losses of a candidate on the inputs of the search."""
        key = f"{self._mark} {candidate.key}"
        if (entry := self._done.get(key)) is None:
            losses, agreement = self._measure(self.model(candidate))
            entry = {"key": key, "losses": losses, "agreement": agreement}
            with disk_errors(self._journal), self._journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            self._done[key] = entry
        return Trial(candidate, entry["losses"], entry["agreement"])

    def _measure(self, model: nn.Module) -> tuple[dict[str, float], dict[str, float]]:
        """Losses and agreement of a model."""
        losses, agreement = {}, {}
        for label, asked in self._asked.items():
            batches = asked.inputs.search
            comparison = compare_answers(model, batches, asked.search, asked.predict)
            agreement[label] = 1.0 - loss_of(comparison, "disagreement")
            if isinstance(self._score, str):
                losses[label] = loss_of(comparison, self._score)
            elif not isinstance(self._score, TaskScore):
                losses[label] = -_finite(float(self._score(model, label, batches)), label)
        if isinstance(self._score, TaskScore):
            losses = {t: _finite(v, t) for t, v in self._score.losses(model).items()}
        return losses, agreement

    def model(self, candidate: TuneCandidate) -> nn.Module:
        """The model as a candidate; a merge that was the last one is not loaded again."""
        if self._taken != candidate.merge.key:
            self._live.take(str(self._merges.folder_of(candidate.merge)))
            self._taken = candidate.merge.key
        return self._live.scaled(candidate.scale)

    def final(self, candidate: TuneCandidate | None) -> dict[str, AnswerComparison]:
        """Comparison with every expert on the inputs that were kept for the end; None: of the base."""
        model = self._live.scaled(0.0) if candidate is None else self.model(candidate)
        return {label: compare_answers(model, a.inputs.final, a.final, a.predict) for label, a in self._asked.items()}


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise RecipeError(f"The score function gave {value} for '{name}'; expected a finite number.")
    return value


def _read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Finished trials; a line that was cut off is left out, and ended, so that the next one is its own."""
    done: dict[str, dict[str, Any]] = {}
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            with disk_errors(path), path.open("a", encoding="utf-8") as file:
                file.write("\n")
        for line in text.splitlines():
            try:
                entry = parse_json(line)
                done[str(entry["key"])] = entry
            except (ValueError, KeyError, TypeError):
                continue
    return done
