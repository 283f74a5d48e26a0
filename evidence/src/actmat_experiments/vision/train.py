"""Training behind a head: the base of the small suite from scratch, and experts, fully or by LoRA on all linear layers.

Shapes: `N` images, `S` pixels a side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmat.extras.demo.model import Head
from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.heads import ClipHead
from actmat_experiments.harness.training import (
    Callback,
    OnStep,
    Resume,
    Schedule,
    Training,
    descend,
    order_of,
    train_by,
    trainable,
)
from actmat_experiments.vision.backbones import Backbone, autocast
from actmat_experiments.vision.images import Examples, ImageTask

_SHIFT = 4


def finetune(
    backbone: Backbone,
    base: Path,
    head: Head | ClipHead,
    examples: Examples,
    how: Training,
    out: Path,
    on_step: OnStep = lambda: None,
    callbacks: Callable[[Any], Sequence[Callback]] = lambda model: (),
) -> None:
    """Train an expert and write it: a checkpoint like the base's, or a PEFT adapter; see `train_by`.

    Args:
        head: frozen; takes no part in the merge.
        callbacks: analyses of the run, made from the model that is trained.
    """
    model, frozen_head = trainable(backbone.load(base), how).train(), head.to(how.device)

    def terms(index: Tensor) -> Iterator[Tensor]:
        for piece in torch.tensor_split(index, how.schedule.micro_batches):
            images_N3SS, labels_N = examples.batch(piece, backbone.scale, how.device)
            with autocast(how.device, how.precision):
                logits_NC = frozen_head(backbone.features(model, images_N3SS))
            yield nn.functional.cross_entropy(logits_NC.float(), labels_N) * (len(piece) / len(index))

    train_by(model, terms, len(examples), how, out, on_step, callbacks(model))


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

    config = ViTConfig(image_size=backbone.size, **asdict(sizes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ViTModel(config, add_pooling_layer=False).to(device)
        head = nn.Linear(sizes.hidden_size, len(task.class_names)).to(device)
    model.train()

    def losses(first: int) -> Iterator[Tensor]:
        for step, index in enumerate(order_of(len(task.train), schedule, seed, task.name, first), first):
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
