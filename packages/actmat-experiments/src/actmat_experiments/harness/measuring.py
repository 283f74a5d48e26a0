"""Statistics of a classifier for the methods that need data: Gram matrices, and the Fisher of drawn labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat_experiments.core import collect

Batch = Mapping[str, Tensor]


def to_measure(load: Callable[[Path], Any], expert: Path, base: Path) -> tuple[Any, Path, Path | None]:
    """The model of an expert, an adapter beside its base's weights; its checkpoint; and the adapter, if it is one."""
    if not (expert / "adapter_config.json").is_file():
        return load(expert), expert, None
    from peft import PeftModel

    return PeftModel.from_pretrained(load(base), str(expert)), base, expert


def measure_classifier(
    load: Callable[[Path], Any],
    logits: Callable[[Any, Batch], Tensor],
    batches: Iterable[Batch],
    *,
    expert: Path,
    base: Path,
    generator: torch.Generator,
    device: torch.device | str,
    fisher: bool = True,
    **collecting: Any,
) -> None:
    """Measure an expert, a full model or an adapter of the base.

    The labels of the Fisher are drawn from the expert's own predictions, `y ~ p(y | x)`, so that it is the Fisher
    `E[(d log p(y | x))^2]` and not the gradient of the training loss.

    Args:
        load: reads a model from its folder.
        logits: of a running model on a batch, `N C` for `N` inputs and `C` classes.
        batches: inputs, on the device.
        expert, base: their folders.
        generator: draws the labels.
        device: where the model runs.
        fisher: measure the Fisher as well, one backward pass per input.
        collecting: `out`, `seed` and `source` of `collect`.
    """
    model, checkpoint, adapter = to_measure(load, expert, base)

    def log_likelihood(running: Any, batch: Batch) -> Tensor:
        logp_NC = logits(running, batch).float().log_softmax(-1)
        drawn_N1 = torch.multinomial(logp_NC.detach().exp().cpu(), 1, generator=generator).to(device)
        return logp_NC.gather(1, drawn_N1).sum()

    collect(
        *(model.to(device), batches),
        checkpoint=checkpoint,
        adapter=adapter,
        fisher=fisher,
        loss=log_likelihood,
        **collecting,
    )
