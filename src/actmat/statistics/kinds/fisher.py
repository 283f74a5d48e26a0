"""Diagonal Fisher: per sample, the squared gradient of the log-likelihood of a label, summed over samples.

    F_i = sum_n ( d log p(y_n | x_n) / d w_i )^2,      y_n drawn from p(. | x_n)  or  given with the data

Labels drawn from the model's own predictions give the Fisher; given labels the "empirical" one (F. Kunstner, L. Balles,
P. Hennig, "Limitations of the empirical Fisher approximation", 2019). For language models `log p` is that of a
sequence: the sum over its tokens, padding left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from actmat.errors import StatisticsError
from actmat.extras.collect.batches import Batch, named_tensors
from actmat.extras.collect.settings import Labels
from actmat.statistics.header import Header, SumInfo
from actmat.statistics.kinds.base import Run, SumKind, Sums

__all__ = ["FISHER", "FisherSum", "log_likelihood"]


class FisherSum:
    """Running sums of squared per-sample gradients of all floating-point parameters."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._parameters = {n: p for n, p in run.binding.parameters.items() if p.is_floating_point()}
        self._sums = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in self._parameters.items()}
        self._samples = 0
        self._generator = torch.Generator("cpu").manual_seed(run.settings.seed)

    def add(self, batch: Batch) -> None:
        """Add every sample of a batch, one backward pass each."""
        if self._run.settings.loss is None and not isinstance(batch, Mapping):
            raise StatisticsError("The Fisher of batches without names needs loss=.")
        tensors = named_tensors(batch)
        before = {n: p.requires_grad for n, p in self._parameters.items()}
        try:
            for parameter in self._parameters.values():
                parameter.requires_grad_(True)
            n_samples = next(iter(tensors.values())).shape[0]
            for n in range(n_samples):
                one = {k: v[n : n + 1] if v.ndim and v.shape[0] == n_samples else v for k, v in tensors.items()}
                self._add_sample(self._run.model, one)
        finally:
            for name, parameter in self._parameters.items():
                parameter.requires_grad_(before[name])
                parameter.grad = None

    def close(self) -> None:
        """Nothing to remove."""

    def totals(self) -> Sums:
        """Sums by stored tensor."""
        stored = {n: part for name, total in self._sums.items() for n, part in self._run.binding.stored(name, total)}
        return Sums(self._samples, stored, {"labels": self._run.settings.fisher_labels})

    def _add_sample(self, model: nn.Module, sample: Mapping[str, Tensor]) -> None:
        settings = self._run.settings
        with torch.enable_grad():
            if settings.loss is not None:
                value = settings.loss(model, sample)
            else:
                value = log_likelihood(model(**sample), sample, settings.fisher_labels, self._generator)
        gradients = torch.autograd.grad(value, list(self._parameters.values()), allow_unused=True)
        for name, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                self._sums[name].add_(gradient.detach().cpu().double().square())
        self._samples += 1


def log_likelihood(output: Any, batch: Mapping[str, Tensor], labels: Labels, generator: torch.Generator) -> Tensor:
    """Log-likelihood of labels under the logits of one sample.

    Classes: `log p(y | x)`. Sequences of logits: the sum over positions; for a decoder with given labels, those labels
    (shifted by one in causal models), -100 left out; drawn labels are drawn at every position that is a token.
    """
    logits = getattr(output, "logits", None)
    if logits is None:
        raise StatisticsError(
            f"The model's output ({type(output).__name__}) has no logits, so that the likelihood of a label is not "
            "known. Collect with a model class that has a head, or pass loss= from Python."
        )
    log_p = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=-1)
    if labels == "given":
        if "labels" not in batch:
            raise StatisticsError("Fisher with given labels needs 'labels' in every batch; found " + ", ".join(batch))
        target = batch["labels"]
        if log_p.ndim == 3 and "decoder_input_ids" not in batch and not hasattr(output, "encoder_last_hidden_state"):
            log_p, target = log_p[:, :-1], target[:, 1:]
        return -functional.nll_loss(log_p.flatten(0, -2), target.flatten(), ignore_index=-100, reduction="sum")
    drawn = torch.multinomial(log_p.detach().exp().flatten(0, -2).cpu(), 1, generator=generator).to(log_p.device)
    chosen = log_p.flatten(0, -2).gather(1, drawn).squeeze(1)
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    if log_p.ndim == 3 and isinstance(mask, Tensor) and mask.shape == log_p.shape[:2]:
        chosen = chosen[mask.flatten().bool()]
    total: Tensor = chosen.sum()
    return total


class _Fisher(SumKind[FisherSum]):
    """The Fisher has fields of its own in the header."""

    def info(self, header: Header) -> SumInfo | None:
        if not header.fisher:
            return None
        return SumInfo(count=header.fisher_samples, tensors=header.fisher, details={"labels": header.fisher_labels})

    def fields(self, info: SumInfo) -> dict[str, Any]:
        labels = info.details["labels"]
        return {"fisher": info.tensors, "fisher_samples": info.count, "fisher_labels": labels}


FISHER = _Fisher("fisher", FisherSum, noun="Fisher")
