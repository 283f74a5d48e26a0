"""Statistics of an expert for the methods that need data: Gram matrices, and the Fisher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat_experiments.core import collect
from actmat_experiments.harness.models import is_adapter, with_adapter

Batch = Mapping[str, Tensor]


def measure_expert(
    load: Callable[[Path], Any],
    batches: Iterable[Batch],
    *,
    expert: Path,
    base: Path,
    device: str,
    **collecting: Any,
) -> None:
    """Measure a full model, or an adapter on its base.

    Args:
        load: reads a model from its folder.
        batches: inputs, on the device.
        expert, base: their folders.
        device: where the model runs.
        collecting: further arguments of `collect`.
    """
    adapter = expert if is_adapter(expert) else None
    model = with_adapter(load, base, adapter) if adapter else load(expert)
    collect(model.to(device), batches, checkpoint=base if adapter else expert, adapter=adapter, **collecting)


def drawn_likelihood(
    logits: Callable[[Any, Batch], Tensor], generator: torch.Generator
) -> Callable[[Any, Batch], Tensor]:
    """Log-likelihood of labels that are drawn from the expert's own predictions, `y ~ p(y | x)`.

    With it the Fisher is `E[(d log p(y | x))^2]` and not the gradient of the training loss.

    Args:
        logits: of a running model on a batch, `N C` for `N` inputs and `C` classes.
    """

    def log_likelihood(running: Any, batch: Batch) -> Tensor:
        logp_NC = logits(running, batch).float().log_softmax(-1)
        drawn_N1 = torch.multinomial(logp_NC.detach().exp().cpu(), 1, generator=generator).to(logp_NC.device)
        return logp_NC.gather(1, drawn_N1).sum()

    return log_likelihood
