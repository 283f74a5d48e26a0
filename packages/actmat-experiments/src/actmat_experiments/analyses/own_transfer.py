"""`transfer` on models of the user: base, experts and a merge from their folders, and data of every expert's task.

The loss is the one that the model's class computes, taken apart into samples: cross-entropy of class labels, or the
mean over a text's tokens. All models are loaded by one class and have the same shapes, heads included.

Shapes: `N` samples, `T` tokens, `V` classes or words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from actmat.errors import RecipeError
from actmat_experiments.analyses.subjects import Batch, Subject, no_loss, open_subject
from actmat_experiments.analyses.transfer import Losses, TransferResult, transfer
from actmat_experiments.core import DataOptions, load_model

AGREEMENT = 1e-3
"""Largest relative difference of the mean of the samples' losses from the loss that the model gives, a mean, too."""


def transfer_of_models(
    base: str,
    experts: Mapping[str, str],
    merged: str,
    data: Mapping[str, DataOptions],
    *,
    model_class: str | None = None,
    device: str = "cpu",
) -> TransferResult:
    """`transfer` of a merged model on disk: every expert on its own data.

    Args:
        base, merged: folders or hub ids.
        experts: name -> folder or hub id.
        data: name -> data of the expert's task, labels included; all of it is one batch, in samples of one length.
        model_class: class of transformers; default: the one that `config.json` names.

    Raises:
        StatisticsError: a model or its data cannot be loaded.
        RecipeError: names or shapes differ, samples have different lengths, or the model gives no loss.
        NumericalError: an inequality does not hold.
    """
    if experts.keys() != data.keys() or not experts:
        raise RecipeError(f"Every expert needs its own data; got {sorted(experts)} and {sorted(data)}.")
    states, losses = {}, {}
    for task, location in experts.items():
        subject = open_subject(location, data[task], model_class=model_class, device=device)
        states[task] = dict(subject.model.state_dict())
        losses[task] = _losses(subject, subject.batch(subject.n_samples))
    others = {place: load_model(place, model_class=model_class, device=device).model for place in (base, merged)}
    model = others[merged]
    _check_shapes(model, {base: dict(others[base].state_dict())} | {experts[t]: s for t, s in states.items()})
    end = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return transfer(model.eval(), dict(others[base].state_dict()), states, end, losses, title=merged)


def _losses(subject: Subject, batch: Batch) -> Losses:
    """The loss of every sample.

    Raises:
        RecipeError: where it is called, that the model's own loss is no mean of these.
    """

    def losses(model: nn.Module) -> Tensor:
        output: Any = model(**batch)
        if not isinstance(getattr(output, "loss", None), Tensor) or "labels" not in batch:
            raise no_loss(subject.location, model)
        whole = float(output.loss)
        loss_N = _by_sample(output.logits, batch["labels"], shifted=not _encoder_decoder(model))
        if not abs(float(loss_N.mean()) - whole) <= AGREEMENT * max(abs(whole), AGREEMENT):
            raise RecipeError(
                f"{subject.location}: the loss of {type(model).__name__} is {whole:.6g}, but the mean cross-entropy "
                f"of its samples is {float(loss_N.mean()):.6g}. Only class labels and texts can be taken apart into "
                "samples."
            )
        return loss_N

    return losses


def _encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _by_sample(logits: Tensor, labels: Tensor, *, shifted: bool) -> Tensor:
    """Cross-entropy per sample, `N`: of classes (`N V` and `N`), or the mean over tokens (`N T V` and `N T`).

    Args:
        shifted: a token's logits are about the next one, as in a causal language model.
    """
    if labels.ndim == 1:
        return nn.functional.cross_entropy(logits, labels, reduction="none")
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss_NT = nn.functional.cross_entropy(logits.mT, labels, reduction="none")
    return loss_NT.sum(1) / (labels != -100).sum(1).clamp(min=1)


def _check_shapes(model: nn.Module, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    wrong = []
    for place, state in states.items():
        for name, parameter in model.named_parameters():
            found = tuple(state[name].shape) if name in state else "missing"
            if found != tuple(parameter.shape):
                wrong.append(f"{place}: {name} is {found}, in the merged model {tuple(parameter.shape)}")
    if wrong:
        raise RecipeError("Base, experts and merged model must have the same parameters.", wrong)
