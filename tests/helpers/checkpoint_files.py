"""Small checkpoints on disk for tests."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from actmat.checkpoints.base import DTYPES


def sample_tensors() -> dict[str, Tensor]:
    """One tensor of every dtype, and shapes with no, one and zero entries."""
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    for name, (dtype, _) in DTYPES.items():
        raw = torch.randint(0, 2 if name == "bool" else 256, (6, 40), dtype=torch.uint8, generator=generator)
        tensors[f"{name}.weight"] = raw.view(dtype)
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 5)
    tensors["one"] = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    return tensors


def save_sharded(tensors: Mapping[str, Tensor], folder: Path, *, shards: int) -> None:
    """Write `model-0000i-of-0000n.safetensors` and its index."""
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % shards == number}
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
