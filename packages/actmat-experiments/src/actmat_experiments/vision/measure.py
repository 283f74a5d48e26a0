"""Statistics of the experts, for the methods that need data: Gram matrices of all layers' inputs, the diagonal Fisher.

Shapes: `N` images, `S` pixels a side, `C` classes.

As in the paper, few training images suffice: 10 batches of 32. The Fisher's labels are drawn from the expert's own
predictions, so that it is the Fisher and not the gradient of the training loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.demo.heads import Head
from actmat.demo.training import generator_for
from actmat_experiments.vision.backbones import Backbone, ClipHead
from actmat_experiments.vision.images import Examples

__all__ = ["measure"]

_BATCH = 32


def measure(
    backbone: Backbone,
    base: Path,
    expert: Path,
    head: Head | ClipHead,
    examples: Examples,
    out: Path,
    *,
    name: str,
    seed: int,
    fisher: bool = True,
    device: str = "cpu",
    advance: Callable[[float], None] = lambda n: None,
) -> None:
    """Measure an expert on images of its task and write the statistics.

    Args:
        base: checkpoint of the base, for adapters.
        head: of the task, for the Fisher.
        seed: of the labels that are drawn.
        fisher: measure the Fisher too, one backward pass per image.
        advance: called after every batch with the number of its images.
    """
    from actmat.statistics import collect

    adapter = expert if (expert / "adapter_config.json").is_file() else None
    model = backbone.load(expert if adapter is None else base)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter))
    model = model.to(device)
    generator = generator_for(seed, f"labels {name}")
    frozen_head = head.to(device)

    def batches() -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(examples), _BATCH):
            yield {"pixel_values": backbone.scale(examples.pixels_NSSC[start : start + _BATCH]).to(device)}
            advance(len(examples.labels_N[start : start + _BATCH]))

    def log_likelihood(running: Any, batch: Mapping[str, Tensor]) -> Tensor:
        logp_NC = frozen_head(backbone.features(running, batch["pixel_values"])).float().log_softmax(-1)
        drawn_N1 = torch.multinomial(logp_NC.detach().exp().cpu(), 1, generator=generator).to(device)
        return logp_NC.gather(1, drawn_N1).sum()

    collect(
        model,
        batches(),
        checkpoint=base if adapter is not None else expert,
        adapter=adapter,
        out=out,
        fisher=fisher,
        loss=log_likelihood,
        seed=seed,
        source=name,
    )
