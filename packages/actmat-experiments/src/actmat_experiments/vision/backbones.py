"""Encoders: images to features, behind frozen heads. A checkpoint of one is a folder that `from_pretrained` loads.

* `vit`: `ViTModel`; the feature is the class token after the last norm; the head is linear.
* `dinov2`: `Dinov2Model`; the same feature and head.
* `clip`: `CLIPVisionModel`; the feature is the class token after `post_layernorm`; the head projects it into the joint
  space with the base's projection, normalises it there, and compares it with the texts of the classes.

Shapes: `N` images, `S` pixels a side, `D` features, `P` width of CLIP's joint space, `C` classes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actmat.extras.demo.model import Head
from actmat_experiments.harness.progress import LOADING
from actmat_experiments.vision.images import Examples, PixelScale

Precision = Literal["float32", "bfloat16", "float16"]

CLIP_SCALE = PixelScale((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET_SCALE = PixelScale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PLAIN_SCALE = PixelScale((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

_MODEL_TYPES = {"vit": "ViTModel", "dinov2": "Dinov2Model", "clip": "CLIPVisionModel"}


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
        with LOADING:
            return self._model_type().from_pretrained(folder, **self._extra()).eval()

    def from_tensors(self, folder: Path, tensors: Mapping[str, Tensor]) -> Any:
        """The encoder of the folder's config with other weights, named as in its file."""
        cls = self._model_type()
        config = cls.config_class.from_pretrained(folder)
        with LOADING:
            return cls.from_pretrained(None, config=config, state_dict=dict(tensors), **self._extra()).eval()

    def features(self, model: Any, images_N3SS: Tensor) -> Tensor:
        """`N 3 S S -> N D`."""
        output = model(pixel_values=images_N3SS)
        features_ND: Tensor = output.pooler_output if self.kind == "clip" else output.last_hidden_state[:, 0]
        return features_ND

    def _model_type(self) -> Any:
        import transformers

        return getattr(transformers, _MODEL_TYPES[self.kind])

    def _extra(self) -> dict[str, Any]:
        return {"add_pooling_layer": False} if self.kind == "vit" else {}


@dataclass(frozen=True, slots=True)
class ClipHead:
    """`logits = text . normalise(projection z)`; the scale `exp(logit_scale)` is in the texts."""

    projection_PD: Tensor
    text_CP: Tensor

    def __call__(self, features_ND: Tensor) -> Tensor:
        """`N D -> N C`."""
        joint_NP = torch.nn.functional.normalize(features_ND @ self.projection_PD.mT, dim=-1)
        return joint_NP @ self.text_CP.mT

    def to(self, device: str) -> ClipHead:
        """The same head elsewhere."""
        return ClipHead(self.projection_PD.to(device), self.text_CP.to(device))


def save_head(head: Head | ClipHead, path: Path) -> None:
    """One head in a safetensors file."""
    if isinstance(head, ClipHead):
        tensors = {"projection": head.projection_PD, "text": head.text_CP}
    else:
        tensors = {"weight": head.weight_CD, "bias": head.bias_C}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def load_head(path: Path) -> Head | ClipHead:
    """Read a file of `save_head`."""
    tensors = load_file(path)
    if "text" in tensors:
        return ClipHead(tensors["projection"], tensors["text"])
    return Head(tensors["weight"], tensors["bias"])


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's safetensors files, sharded or not."""
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return {name: tensor for file in sorted(files) for name, tensor in load_file(folder / file).items()}


_IMAGES_TESTED = 250


def autocast(device: str, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Forward passes in this precision; weights stay as they are."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, getattr(torch, precision))


@torch.inference_mode()
def features(
    backbone: Backbone, models: Sequence[Any], examples: Examples, device: str = "cpu", precision: Precision = "float32"
) -> list[Tensor]:
    """`N S S 3 -> N D` of every encoder, on the CPU; the images are read once for all of them."""
    there = [model.to(device) for model in models]
    found: list[list[Tensor]] = [[] for _ in models]
    for pixels_BSSC in examples.batches(_IMAGES_TESTED):
        images_B3SS = backbone.scale(pixels_BSSC.to(device, non_blocking=True))
        for model, parts in zip(there, found, strict=True):
            with autocast(device, precision):
                parts.append(backbone.features(model, images_B3SS).float())
    return [torch.cat(parts).cpu() for parts in found]


def right_answers(
    backbone: Backbone,
    models: Sequence[Any],
    head: Head | ClipHead,
    examples: Examples,
    device: str = "cpu",
    precision: Precision = "float32",
) -> list[dict[str, int]]:
    """Numbers of right answers of every encoder behind a head, `correct`, and of all answers, `total`."""
    return [
        {"correct": int((head(features_ND).argmax(1) == examples.labels_N).sum()), "total": len(examples)}
        for features_ND in features(backbone, models, examples, device, precision)
    ]


def load_expert(load: Callable[[Path], Any], base: Path, expert: Path) -> Any:
    """The model of an expert: a checkpoint, or an adapter merged into the base; `load` reads a checkpoint."""
    if not (expert / "adapter_config.json").is_file():
        return load(expert)
    from peft import PeftModel

    with LOADING:
        return PeftModel.from_pretrained(load(base), str(expert)).merge_and_unload().eval()
