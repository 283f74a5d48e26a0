"""Door of packed codes: GPTQ, AWQ and compressed-tensors, with all their parts and configs that say something else."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from safetensors.torch import save

from fuzz.doors.folder import in_folder, read_all
from fuzz.draw import json_text, mutated_bytes
from fuzz.harness import Files, door

Parts = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
INTS = torch.int32
LAYOUTS: dict[str, tuple[dict[str, Any], Parts]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
        (("a.qweight", INTS, (2, 8)), ("a.qzeros", INTS, (2, 1)), ("a.scales", torch.float16, (2, 8)), ("a.g_idx", INTS, (16,))),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True},
        (("a.qweight", INTS, (16, 2)), ("a.qzeros", INTS, (2, 2)), ("a.scales", torch.float16, (2, 16))),
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 8,
                                       "strategy": "group", "symmetric": False, "actorder": "group"}}}},
        (("a.weight_packed", INTS, (8, 2)), ("a.weight_scale", torch.bfloat16, (8, 2)), ("a.weight_shape", torch.int64, (2,)),
         ("a.weight_zero_point", INTS, (1, 2)), ("a.weight_g_idx", INTS, (16,))),
    ),
}  # fmt: skip
"""Method -> its entry in `config.json`, and the parts of a weight of 16 inputs."""


@cache
def _part(dtype: torch.dtype, shape: tuple[int, ...], kind: int) -> torch.Tensor:
    """Values of a part: 0, groups of 8 inputs or the rows and columns, all bits, or far outside."""
    if shape == (16,) and kind == 0:
        return torch.arange(16).div(8, rounding_mode="floor").to(dtype)
    if shape == (2,) and dtype is torch.int64:
        return torch.tensor([8, 16] if kind < 2 else [2**62, -1], dtype=dtype)
    if not dtype.is_floating_point:
        return torch.full(shape, (0x12345678, -1, -(2**31))[kind], dtype=dtype)
    return torch.full(shape, (0.5, float("inf"), float("nan"))[kind]).to(dtype)


def _case(rng: random.Random) -> Files:
    entry, parts = LAYOUTS[rng.choice(list(LAYOUTS))]
    tensors = {}
    for name, dtype, shape in parts:
        kind = rng.random()
        if kind < 0.04:
            continue
        own = tuple(rng.choice((0, 1, 2, 3, 16)) for _ in shape) if kind < 0.08 else shape
        other = rng.choice((torch.int64, torch.uint8, torch.float32)) if kind > 0.97 else dtype
        tensors[name] = _part(dtype, own, rng.choice((0, 0, 0, 0, 1, 2))).to(other, copy=True)
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": entry}
    content = save(tensors)
    return {"config.json": json_text(rng, config),
            "model.safetensors": mutated_bytes(rng, content) if rng.random() < 0.1 else content}  # fmt: skip


door("packed codes", _case, in_folder(read_all))
