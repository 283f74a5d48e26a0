"""Accuracies of encoders behind frozen heads.

Shapes: `N` images, `S` pixels a side, `D` features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.demo.heads import Head
from actmat_experiments.harness.loading import LOADING
from actmat_experiments.vision.backbones import Backbone, ClipHead
from actmat_experiments.vision.images import Examples

__all__ = ["features", "load_expert", "right_answers"]

_BATCH = 250


@torch.inference_mode()
def features(backbone: Backbone, model: Any, examples: Examples, device: str = "cpu") -> Tensor:
    """`N S S 3 -> N D`, on the CPU."""
    model = model.to(device)
    found = []
    for start in range(0, len(examples), _BATCH):
        images_N3SS = backbone.scale(examples.pixels_NSSC[start : start + _BATCH])
        found.append(backbone.features(model, images_N3SS.to(device)).float().cpu())
    return torch.cat(found)


def right_answers(
    backbone: Backbone, model: Any, head: Head | ClipHead, examples: Examples, device: str = "cpu"
) -> dict[str, int]:
    """How many answers of an encoder behind a head are right, `correct`, and how many there are, `total`."""
    logits_NC = head(features(backbone, model, examples, device))
    return {"correct": int((logits_NC.argmax(1) == examples.labels_N).sum()), "total": len(examples)}


def load_expert(backbone: Backbone, base: Path, expert: Path) -> Any:
    """The encoder of an expert: a checkpoint, or an adapter merged into the base."""
    if not (expert / "adapter_config.json").is_file():
        return backbone.load(expert)
    from peft import PeftModel

    with LOADING:
        return PeftModel.from_pretrained(backbone.load(base), str(expert)).merge_and_unload().eval()
