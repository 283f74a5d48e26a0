"""Training behind a head: the base of the small suite from scratch, and experts, fully or by LoRA on all linear layers.

Shapes: `N` images, `S` pixels a side, `D` features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat.extras.demo.model import Head
from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.results import Regime
from actmat_experiments.harness.training import Callback, OnStep, Resume, Schedule, descend
from actmat_experiments.vision.backbones import Backbone, ClipHead, Precision, autocast
from actmat_experiments.vision.images import Examples, ImageTask

CallbacksOf = Callable[[Any], Sequence[Callback]]
"""Makes the callbacks of a run from its model."""


@dataclass(frozen=True, slots=True)
class Training:
    """Training of an expert.

    Args:
        name: of the task; with the seed it decides the order of examples and the start of the factors.
        regime: all weights, or LoRA with `alpha = rank` and no dropout.
        precision: of the forward pass (autocast); weights and moments stay float32.
        save_every: steps between two states.
    """

    name: str
    seed: int
    schedule: Schedule
    regime: Regime = "full"
    rank: int = 16
    device: str = "cpu"
    precision: Precision = "float32"
    save_every: int = 500


def finetune(
    backbone: Backbone,
    base: Path,
    head: Head | ClipHead,
    examples: Examples,
    how: Training,
    out: Path,
    on_step: OnStep = lambda: None,
    callbacks: CallbacksOf = lambda model: (),
) -> None:
    """Train an expert and write it: a checkpoint like the base's, or a PEFT adapter.

    A run that was interrupted goes on from its last state, `state.pt` in `out`; with callbacks it begins
    again, since they have to see all of it.

    Args:
        head: frozen; takes no part in the merge.
        callbacks: analyses of the run, made from the model that is trained.
    """
    schedule = how.schedule
    model = backbone.load(base)
    if how.regime == "lora":
        model = with_adapter(model, how.rank, generator_for(how.seed, f"factors {how.name}"))
    model = model.to(how.device).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    frozen_head = head.to(how.device)

    def terms(index: Tensor) -> Iterator[Tensor]:
        for piece in torch.tensor_split(index, schedule.micro_batches):
            images_N3SS, labels_N = examples.batch(piece, backbone.scale, how.device)
            with autocast(how.device, how.precision):
                logits_NC = frozen_head(backbone.features(model, images_N3SS))
            yield nn.functional.cross_entropy(logits_NC.float(), labels_N) * (len(piece) / len(index))

    def losses(first: int) -> Iterator[Iterator[Tensor]]:
        for index in batches(examples, schedule, seed=how.seed, name=how.name, first=first):
            yield terms(index)

    made = callbacks(model)
    state = out / "state.pt"
    resume = None if made else Resume(state, how.save_every)
    descend(parameters, losses, schedule.steps(len(examples)), schedule, on_step, made, resume)
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


def with_adapter(model: Any, rank: int, generator: torch.Generator, alpha: int = 0) -> Any:
    """The model with LoRA factors on all linear layers; `A` as PEFT draws it, from this generator, `B` zero.

    Args:
        alpha: 0: the rank.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha or rank, lora_dropout=0.0, target_modules="all-linear")
    adapted = get_peft_model(model, config)
    for parameter_name, parameter in adapted.named_parameters():
        if ".lora_A." in parameter_name:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
    return adapted


_SHIFT = 4


@dataclass(frozen=True, slots=True)
class VitSizes:
    """Sizes of the encoder."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    patch_size: int = 8


def pretrain(
    backbone: Backbone,
    sizes: VitSizes,
    task: ImageTask,
    schedule: Schedule,
    out: Path,
    *,
    seed: int,
    device: str = "cpu",
    on_step: OnStep = lambda: None,
) -> None:
    """Train the encoder and a linear head on the task, keep the encoder. Images are mirrored and shifted at random.

    Args:
        backbone: of kind "vit".
        seed: decides start, order and augmentation.
    """
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        image_size=backbone.size,
        patch_size=sizes.patch_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ViTModel(config, add_pooling_layer=False).to(device)
        head = nn.Linear(sizes.hidden_size, len(task.class_names)).to(device)
    model.train()

    def losses(first: int) -> Iterator[Tensor]:
        for step, index in enumerate(batches(task.train, schedule, seed=seed, name=task.name, first=first), first):
            images_N3SS, labels_N = task.train.batch(index, backbone.scale, "cpu")
            images_N3SS = augmented(images_N3SS, generator_for(seed, f"augmentation {step}")).to(device)
            logits_NC = head(backbone.features(model, images_N3SS))
            yield nn.functional.cross_entropy(logits_NC, labels_N.to(device))

    state = out.parent / "state.pt"
    parameters = [*model.parameters(), *head.parameters()]
    descend(parameters, losses, schedule.steps(len(task.train)), schedule, on_step, (), Resume(state))
    model.to("cpu").save_pretrained(out)
    state.unlink(missing_ok=True)


def augmented(images_N3SS: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrored with probability a half, and moved by up to four pixels each way, with borders repeated."""
    n, _, side, _ = images_N3SS.shape
    mirrored_N = torch.rand(n, generator=generator) < 0.5
    images_N3SS = torch.where(mirrored_N[:, None, None, None], images_N3SS.flip(-1), images_N3SS)
    padded = nn.functional.pad(images_N3SS, (_SHIFT,) * 4, mode="replicate")
    moves_N2 = torch.randint(0, 2 * _SHIFT + 1, (n, 2), generator=generator).tolist()
    return torch.stack([image[:, y : y + side, x : x + side] for image, (y, x) in zip(padded, moves_N2, strict=True)])
