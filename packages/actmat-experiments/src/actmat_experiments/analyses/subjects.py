"""A model of the user with data, as an analysis needs it: a loss to differentiate, and a plain training loop.

The model is what transformers loads from the folder (or hub id) with the head that computes its loss: a causal language
model on texts, an image classifier on images and labels, an encoder-decoder on texts and targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actmat.errors import RecipeError
from actmat_experiments.analyses.angles import DriftAngles
from actmat_experiments.analyses.drift import DriftAlongRun, Moment, moments_until
from actmat_experiments.analyses.monitor import DriftMonitor
from actmat_experiments.core import DataOptions, load_model, make_batches

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and all its data, in batches; `location` names it in titles."""

    location: str
    model: nn.Module
    batches: Sequence[Batch]

    @property
    def n_samples(self) -> int:
        """In all batches."""
        return sum(_samples(b) for b in self.batches)

    def loss(self, batch: Batch) -> Tensor:
        """The model's own loss, a mean over the batch.

        Raises:
            RecipeError: the model gives none.
        """
        found = getattr(self.model(**batch), "loss", None)
        if not isinstance(found, Tensor):
            raise _no_loss(self.location, self.model)
        return found

    def whole(self, n_samples: int) -> Tensor:
        """Loss of the first samples, for `correlation`.

        Raises:
            RecipeError: padding, or fewer samples than wanted.
        """
        return self.loss(self.batch(n_samples))

    def batch(self, n_samples: int) -> Batch:
        """The first samples as one batch: they must have one length.

        Raises:
            RecipeError: padding, or fewer samples than wanted.
        """
        if n_samples > self.n_samples:
            raise RecipeError(f"{self.location}: there are {self.n_samples} samples, fewer than {n_samples}.")
        shapes = {tuple(v.shape[1:] for v in b.values()) for b in self.batches}
        masks = [b[k] for b in self.batches for k in ("attention_mask", "decoder_attention_mask") if k in b]
        if len(shapes) > 1 or any(bool((mask == 0).any()) for mask in masks):
            raise RecipeError(
                f"{self.location}: the samples have different lengths, and padding would count as data. Choose texts "
                "that all reach --max-length."
            )
        keys = self.batches[0].keys()
        return {k: torch.cat([b[k] for b in self.batches])[:n_samples] for k in keys}


def _no_loss(location: str, model: nn.Module) -> RecipeError:
    """Error about a model that computes no loss."""
    return RecipeError(
        f"{location}: {type(model).__name__} gives no loss on this data. It needs a head that computes one, and "
        "labels: choose --model-class, and --label-column or --target-column."
    )


def open_subject(location: str, data: DataOptions, *, model_class: str | None = None, device: str = "cpu") -> Subject:
    """Load a model and its data, labels included.

    Raises:
        StatisticsError: model or data cannot be loaded.
        RecipeError: the data is empty, or has no column of labels for a classifier of texts.
    """
    loaded = load_model(location, model_class=model_class, device=device)
    if data.label_column is None and type(loaded.model).__name__.endswith("ForSequenceClassification"):
        raise _no_loss(location, loaded.model)
    batches = list(make_batches(loaded, data, labels=True))
    if not batches:
        raise RecipeError(f"{data.location} is empty: expected at least one sample.")
    return Subject(location, loaded.model, batches)


@dataclass(frozen=True, slots=True)
class Finetuning:
    """A plain fine-tuning run: AdamW without weight decay at a constant rate, batches in turn."""

    steps: int = 100
    rate: float = 1e-5
    layers: Sequence[str] | None = None
    n_moments: int = 10


def finetune(
    subject: Subject,
    how: Finetuning,
    *,
    on_moment: Callable[[int, DriftMonitor], object] = lambda step, monitor: None,
    on_step: Callable[[], object] = lambda: None,
) -> DriftAlongRun:
    """Fine-tune the model, in place, with Theorem 3.1's angles at moments of the run.

    Args:
        on_moment: called at step 0 and at every moment, after the inputs of all data have been measured.

    Raises:
        RecipeError: no steps, or a model without a loss.
    """
    if how.steps < 1 or not how.rate > 0:
        raise RecipeError(f"A run has steps and a rate above zero; got {how.steps} and {how.rate:g}.")
    monitor = DriftMonitor(layers=how.layers).attach(subject.model)
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=how.rate, weight_decay=0.0)
    wanted, moments = set(moments_until(how.steps, how.n_moments)), []
    subject.model.train()
    try:
        _measure(subject, monitor)
        on_moment(0, monitor)
        for step, batch in zip(range(how.steps), _in_turn(subject.batches), strict=False):
            value = subject.loss(batch)
            optimizer.zero_grad()
            with monitor.step(step, mask=batch.get("attention_mask")):
                torch.autograd.backward(value)
            optimizer.step()
            on_step()
            if step + 1 in wanted:
                loss = _measure(subject, monitor)
                moments.append(Moment(step + 1, loss, _defined(monitor.angles())))
                on_moment(step + 1, monitor)
    finally:
        monitor.detach()
        subject.model.eval()
    settings: dict[str, Any] = {"model": subject.location, "optimizer": "AdamW", "rate": how.rate}
    settings |= {"n_steps": how.steps, "n_samples": subject.n_samples, "batches": len(subject.batches)}
    return DriftAlongRun(f"{subject.location}, AdamW", settings, moments, monitor.not_read)


def _measure(subject: Subject, monitor: DriftMonitor) -> float:
    """Inputs of all data at the weights of the moment; returns the mean loss."""
    total, was = 0.0, subject.model.training
    subject.model.eval()
    with torch.no_grad():
        for number, batch in enumerate(subject.batches):
            with monitor.inputs(mask=batch.get("attention_mask"), more=number > 0):
                total += float(subject.loss(batch)) * _samples(batch)
    subject.model.train(was)
    return total / subject.n_samples


def _defined(angles: Mapping[str, DriftAngles]) -> dict[str, DriftAngles]:
    """Maps that the run has moved; the others have no direction."""
    return {name: a for name, a in angles.items() if a.estimate == a.estimate}


def _in_turn(batches: Sequence[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def _samples(batch: Batch) -> int:
    return len(next(iter(batch.values())))
