"""Encoders: images to features, behind frozen heads. A checkpoint of one is a folder that `from_pretrained` loads.

* `vit`: `ViTModel`; the feature is the class token after the last norm; the head is linear.
* `dinov2`: `Dinov2Model`; the same feature and head.
* `clip`: `CLIPVisionModel`; the feature is the class token after `post_layernorm`; the head projects it into the joint
  space with the base's projection, normalizes it there, and compares it with the texts of the classes.

Shapes: `N` images, `S` pixels a side, `D` features.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from actmat_experiments.harness.models import load_model
from actmat_experiments.harness.training import Precision
from actmat_experiments.vision.images import Examples, PixelScale

CLIP_SCALE = PixelScale((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET_SCALE = PixelScale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PLAIN_SCALE = PixelScale((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTModel", {"add_pooling_layer": False}),
    "dinov2": ("Dinov2Model", {}),
    "clip": ("CLIPVisionModel", {}),
}
_IMAGES_TESTED = 250


@dataclass(frozen=True, slots=True)
class Backbone:
    """A family of encoders.

    Args:
        kind: which model, see the module.
        size: pixels a side of its images.
    """

    kind: Literal["vit", "dinov2", "clip"]
    size: int
    scale: PixelScale

    def load(self, folder: Path) -> Any:
        """The encoder of a checkpoint, in evaluation mode."""
        name, how = _MODELS[self.kind]
        return load_model(name, folder, **how)

    def features(self, model: Any, images_N3SS: Tensor) -> Tensor:
        """`N 3 S S -> N D`."""
        output = model(pixel_values=images_N3SS)
        features_ND: Tensor = output.pooler_output if self.kind == "clip" else output.last_hidden_state[:, 0]
        return features_ND


def autocast(device: str, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Forward passes in this precision; weights stay as they are."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, getattr(torch, precision))


@torch.inference_mode()
def features(
    backbone: Backbone, model: Any, examples: Examples, device: str = "cpu", precision: Precision = "float32"
) -> Tensor:
    """`N S S 3 -> N D` of an encoder, on the CPU."""
    there, parts = model.to(device), []
    for pixels_BSSC in examples.batches(_IMAGES_TESTED):
        images_B3SS = backbone.scale(pixels_BSSC.to(device, non_blocking=True))
        with autocast(device, precision):
            parts.append(backbone.features(there, images_B3SS).float())
    return torch.cat(parts).cpu()
