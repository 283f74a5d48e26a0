"""Small checkpoints on disk for tests."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def save_folder(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """A folder with one weight file, and a config where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_lora(folder: Path, modules: Mapping[str, tuple[Tensor, ...]], **fields: Any) -> Path:
    """An adapter by hand: module -> A, B and maybe a bias of B."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b, *bias) in modules.items():
        at = f"base_model.model.{name}.lora_"
        tensors |= {f"{at}A.weight": a, f"{at}B.weight": b, **({f"{at}B.bias": bias[0]} if bias else {})}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    rank = next(iter(modules.values()))[0].shape[0]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(modules), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def edit_json(file: Path, **fields: object) -> Path:
    """Change entries of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return file


def edit_config(folder: Path, **fields: object) -> None:
    """Change fields of an adapter's config."""
    edit_json(folder / "adapter_config.json", **fields)
