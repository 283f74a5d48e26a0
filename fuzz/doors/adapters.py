"""Door of adapters: `adapter_config.json` and the names and shapes of its factors."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from fuzz.doors.folder import form_factors, in_folder, inspected
from fuzz.draw import json_text
from fuzz.harness import Files, door

CONFIG = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"q_proj": 2, r"layers\.0\.v": 3}, "alpha_pattern": {"q.*": 1},
    "target_modules": ["q_proj", "k_proj"], "bias": "none", "use_rslora": False, "fan_in_fan_out": False, "use_dora": False,
    "modules_to_save": ["head"], "init_lora_weights": True, "base_model_name_or_path": "org/base", "layers_to_transform": [0],
    "layers_pattern": "layers", "layer_replication": None, "megatron_config": None, "task_type": "CAUSAL_LM",
}  # fmt: skip
STEM = "base_model.model.model.layers.0."


@cache
def _factors(kind: int) -> bytes:
    """Weights of a small adapter: plain, of an embedding, of a convolution, with a tensor trained in full, with odd names."""
    pair = {f"{STEM}q_proj.lora_A.weight": torch.ones(2, 4), f"{STEM}q_proj.lora_B.weight": torch.ones(4, 2)}
    more = (
        {},
        {f"{STEM}e.lora_embedding_A": torch.ones(2, 5), f"{STEM}e.lora_embedding_B": torch.ones(4, 2)},
        {f"{STEM}c.lora_A.weight": torch.ones(2, 3, 3, 3), f"{STEM}c.lora_B.weight": torch.ones(4, 2, 1, 1)},
        {"base_model.model.head.weight": torch.ones(3, 4), f"{STEM}q_proj.lora_magnitude_vector": torch.ones(4)},
        {f"{STEM}k\x1b[2J.lora_A.weight": torch.ones(2, 4), f"{STEM}q_proj.bias": torch.ones(4)},
    )
    return save({**pair, **more[kind]})


def _adapter(rng: random.Random) -> Files:
    config = {k: v for k, v in CONFIG.items() if rng.random() < 0.7 or k in ("peft_type", "r")}
    return {"adapter_config.json": json_text(rng, config), "adapter_model.safetensors": _factors(rng.randrange(5))}


def _read(folder: Path) -> str:
    form_factors(folder)
    return inspected(folder)


door("adapter configs", _adapter, in_folder(_read))
