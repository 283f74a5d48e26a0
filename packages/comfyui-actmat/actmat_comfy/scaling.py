"""Copies of LoRA files scaled by their strengths, with the deltas that ComfyUI would add."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import actmat
from actmat.errors import CheckpointError
from actmat.extras.diffusion.blocks import block_weights
from actmat.planning.calls import NOWHERE, resolved
from actmat.recipe.values import read_value

from .stacks import Lora

_UP = ("up.weight", "lora_B.weight", "lora_B.default.weight")
"""Suffixes of the second factor."""


@contextlib.contextmanager
def at_strength(loras: tuple[Lora, ...], folder: Path) -> Iterator[list[Path]]:
    """Yield LoRA files that, merged without weights, give ComfyUI's sum; in `folder` until the context ends."""
    try:
        yield [_scaled(lora, folder / str(k)) for k, lora in enumerate(loras)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _scaled(lora: Lora, folder: Path) -> Path:
    """The file itself at strength 1, else a scaled copy without modules of strength 0.

    Raises:
        CheckpointError: the file is not plain LoRA, which actmat would also refuse.
    """
    if lora.model == lora.clip == 1.0 and not lora.blocks:
        return lora.file
    tensors: dict[str, Tensor] = {}
    with actmat.open_model(lora.file) as weights:
        metadata = dict(weights.folder.header)
        factor = read_value(block_weights(lora.blocks, weights.specs)[0]) if lora.blocks else 1.0
        has_alpha = any(name.endswith(".alpha") for name in weights.specs)
        for name in weights.specs:
            strength = lora.strength_of(name) * resolved(factor, name, NOWHERE)
            if strength:
                tensor = weights.tensors.read(name)
                is_scale = name.endswith(".alpha") if has_alpha else name.endswith(_UP)
                tensors[name] = _times(tensor, strength) if is_scale else tensor
    if not any(name.endswith(_UP) for name in weights.specs):
        raise CheckpointError(f"{lora.file} has no LoRA factors.")
    if not tensors:
        raise CheckpointError(
            f"{lora.name} has no module left at strength {lora.model:g} of the model and {lora.clip:g} of CLIP. "
            "Fix: remove it from the stack, or give another strength."
        )
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{lora.file.stem}.safetensors"
    save_file(tensors, out, metadata=metadata)
    return out


def _times(tensor: Tensor, factor: float) -> Tensor:
    """The product, in the tensor's dtype if it is exact there, else in float32."""
    exact = tensor.double() * factor
    rounded = exact.to(tensor.dtype) if tensor.is_floating_point() else exact.float()
    return rounded if torch.equal(rounded.double(), exact) else exact.float()
