"""Experts: a copy of the base, or LoRA factors on all its linear layers, trained on one task behind a frozen head.

Shapes: `N` images, `S` pixels a side.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from actmat.demo.heads import Head
from actmat.demo.training import Callback, OnStep, Schedule, descend, generator_for, steps_of
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.training import Resume
from actmat_experiments.vision.backbones import Backbone, ClipHead
from actmat_experiments.vision.images import Examples

__all__ = ["Precision", "batches", "finetune", "with_adapter"]

Precision = Literal["float32", "bfloat16"]
CallbacksOf = Callable[[Any], Sequence[Callback]]
"""Makes the callbacks of a run from its model."""


def finetune(
    backbone: Backbone,
    base: Path,
    head: Head | ClipHead,
    examples: Examples,
    schedule: Schedule,
    out: Path,
    *,
    name: str,
    seed: int,
    regime: Regime = "full",
    rank: int = 16,
    device: str = "cpu",
    precision: Precision = "float32",
    on_step: OnStep = lambda: None,
    callbacks: CallbacksOf = lambda model: (),
    save_every: int = 500,
) -> None:
    """Train an expert and write it: a checkpoint like the base's, or a PEFT adapter.

    A run that was interrupted goes on from its last state, `state.safetensors` in `out`; with callbacks it begins
    again, since they have to see all of it.

    Args:
        head: frozen; takes no part in the merge.
        name: of the task; with the seed it decides the order of examples and the start of the factors.
        regime: all weights, or LoRA with `alpha = rank` and no dropout.
        precision: of the forward pass (autocast); weights and moments stay float32.
        callbacks: analyses of the run, made from the model that is trained.
    """
    model = backbone.load(base)
    if regime == "lora":
        model = with_adapter(model, rank, generator_for(seed, f"factors {name}"))
    model = model.to(device).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    frozen_head = head.to(device)
    cast = torch.autocast(torch.device(device).type, torch.bfloat16) if precision == "bfloat16" else None

    def losses(first: int) -> Iterator[Tensor]:
        for index in batches(examples, schedule, seed=seed, name=name, first=first):
            for piece in torch.tensor_split(index, schedule.micro_batches):
                images_N3SS = backbone.scale(examples.pixels_NSSC[piece.sort().values.numpy()]).to(device)
                labels_N = examples.labels_N[piece.sort().values].to(device)
                with cast or contextlib.nullcontext():
                    logits_NC = frozen_head(backbone.features(model, images_N3SS))
                yield nn.functional.cross_entropy(logits_NC.float(), labels_N)

    made = callbacks(model)
    state = out / "state.safetensors"
    resume = None if made else Resume(state, save_every)
    descend(parameters, losses, steps_of(schedule, len(examples)), schedule, on_step, made, resume)
    model.to("cpu").save_pretrained(out)
    state.unlink(missing_ok=True)


def batches(examples: Examples, schedule: Schedule, *, seed: int, name: str, first: int = 0) -> Iterator[Tensor]:
    """Positions of each step's examples, from step `first` on; every epoch has an order of its own."""
    per_epoch = len(examples) // schedule.batch_size
    for epoch in range(first // max(1, per_epoch), schedule.epochs):
        order = torch.randperm(len(examples), generator=generator_for(seed, f"order {name} {epoch}"))
        start = first - epoch * per_epoch if epoch == first // per_epoch else 0
        for batch in range(start, per_epoch):
            yield order[batch * schedule.batch_size : (batch + 1) * schedule.batch_size]


def with_adapter(model: Any, rank: int, generator: torch.Generator) -> Any:
    """The model with LoRA factors on all linear layers; `A` as PEFT draws it, from this generator, `B` zero."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules="all-linear"))
    for parameter_name, parameter in adapted.named_parameters():
        if ".lora_A." in parameter_name:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
    return adapted
