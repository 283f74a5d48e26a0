"""Small checkpoints on disk for tests."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


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
