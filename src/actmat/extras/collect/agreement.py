"""Compare the answers of a merged model with those of an expert on a few unlabeled inputs of the expert's task.

Of all the numbers studied in docs/tried.md, only the divergence correlated with the accuracy that an expert loses in
a merge in every family of models. It needs inputs of the task; no number that needs none did.

Shapes: `N` predictions, `C` classes (of a language model: tokens, and the vocabulary).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actmat.errors import StatisticsError
from actmat.extras.collect.batches import Batch, call_model, evaluating


@dataclass(frozen=True, slots=True)
class Agreement:
    """Distance between the answers of a merged model and an expert's; 0 and 0 for the expert itself."""

    disagreement: float  # share of predictions whose most probable class differs
    divergence: float  # mean of `KL(expert || merged)` in nats: the better forecast of the two
    predictions: int  # number of predictions compared


def agreement(
    merged: nn.Module,
    expert: nn.Module,
    batches: Iterable[Batch],
    *,
    logits: Callable[[Any], Tensor] | None = None,
    mask: Callable[[Any], Tensor | None] | None = None,
) -> Agreement:
    """Run both models over the same inputs of the expert's task and compare their predictions.

    >>> model = nn.Linear(2, 3)
    >>> agreement(model, model, [torch.randn(5, 2)])
    Agreement(disagreement=0.0, divergence=0.0, predictions=5)

    Args:
        merged, expert: models that take the same batches; their training mode is restored.
        batches: mappings (keyword arguments), tuples (positional ones) or single tensors; no labels are needed.
        logits: from a model's output to `* C`, such as a classification head; default: the output, or its `logits`.
        mask: from a batch to True for the predictions that count, in the shape of the logits without `C`; default:
            the batch's `attention_mask` if it has that shape; for a decoder, the `labels` that are not
            -100, else its `decoder_attention_mask`.

    Raises:
        StatisticsError: no batches, predictions of different shapes, or a value that is not finite.
    """
    differing, divergence, count = 0, [], 0
    with torch.no_grad(), evaluating(merged), evaluating(expert):
        for batch in batches:
            mine, theirs = (_predict(model, batch, logits) for model in (merged, expert))
            mine, theirs = _counted(mine, theirs, batch, mask)
            log_q_NC, log_p_NC = (x.double().log_softmax(-1) for x in (mine, theirs))
            nats = float((log_p_NC.exp() * (log_p_NC - log_q_NC)).sum())
            if not math.isfinite(nats):
                raise StatisticsError(
                    "A prediction is NaN or infinite, so the models cannot be compared. Fix: check the merged model's "
                    "weights (actmat diagnose), or use another dtype."
                )
            differing += int((mine.argmax(-1) != theirs.argmax(-1)).sum())
            divergence.append(nats)
            count += len(mine)
    if not count:
        raise StatisticsError("No predictions to compare: there were no batches, or every prediction was masked.")
    return Agreement(differing / count, math.fsum(divergence) / count, count)


def _counted(
    mine: Tensor, theirs: Tensor, batch: Batch, mask: Callable[[Any], Tensor | None] | None
) -> tuple[Tensor, Tensor]:
    """Logits of both models, `N C`, for the predictions of a batch that count."""
    if mine.shape != theirs.shape:
        raise StatisticsError(
            f"The merged model predicts {tuple(mine.shape)}, the expert {tuple(theirs.shape)}: they must "
            "answer the same question, with the same head. Pass logits= to apply the expert's head to both."
        )
    kept = (mask or _attention)(batch)
    if kept is not None and kept.shape == mine.shape[:-1]:
        mine, theirs = mine[kept.bool()], theirs[kept.bool()]
    elif mask is not None and kept is not None:
        raise StatisticsError(f"The mask has the shape {tuple(kept.shape)}, the predictions {tuple(mine.shape[:-1])}.")
    return mine.flatten(0, -2), theirs.flatten(0, -2)


def _predict(model: nn.Module, batch: Batch, logits: Callable[[Any], Tensor] | None) -> Tensor:
    """Logits of a batch, `* C`."""
    output = call_model(model, batch)
    found = logits(output) if logits is not None else getattr(output, "logits", output)
    if not isinstance(found, Tensor) or found.ndim < 2:
        raise StatisticsError(
            f"{type(model).__name__} returns {type(output).__name__}, which has no logits. Pass logits=, a "
            "function from the model's output to logits."
        )
    return found


def _attention(batch: Batch) -> Tensor | None:
    """Mask of the predictions that count; the mask of an encoder does not apply to its decoder's predictions."""
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get("labels")
    if "decoder_input_ids" in batch:
        return labels != -100 if labels is not None else batch.get("decoder_attention_mask")
    return None if labels is not None else batch.get("attention_mask")
