"""The base of the small suite: a ViT trained from scratch to classify one set of images.

Shapes: `N` images, `S` pixels a side, `D` features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from actmat.demo.training import OnStep, Schedule, descend, generator_for, steps_of
from actmat_experiments.harness.training import Resume
from actmat_experiments.vision.backbones import Backbone
from actmat_experiments.vision.finetune import batches
from actmat_experiments.vision.images import ImageTask

__all__ = ["VitSizes", "augmented", "pretrain"]

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
            index = index.sort().values
            images_N3SS = backbone.scale(task.train.pixels_NSSC[index.numpy()])
            images_N3SS = augmented(images_N3SS, generator_for(seed, f"augmentation {step}")).to(device)
            logits_NC = head(backbone.features(model, images_N3SS))
            yield nn.functional.cross_entropy(logits_NC, task.train.labels_N[index].to(device))

    state = out.parent / "state.safetensors"
    parameters = [*model.parameters(), *head.parameters()]
    descend(parameters, losses, steps_of(schedule, len(task.train)), schedule, on_step, (), Resume(state))
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
