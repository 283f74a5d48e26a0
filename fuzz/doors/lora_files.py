"""Door of LoRA files without a config: names of factors, shapes, scales, and the configs in the file's metadata."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from actmat.checkpoints.memory import hold_model
from actmat.checkpoints.model import Model
from actmat.experts.locate import fit_expert, locate
from actmat.extras.diffusion.lora_files import METADATA_KEY
from fuzz.doors.folder import form_factors, in_folder, inspected
from fuzz.draw import json_text, mutated_bytes, text
from fuzz.harness import Files, door

FACTORS = (
    ("lora_unet_mid_block_to_q", ("lora_down.weight", "lora_up.weight", "alpha")),
    ("lora_unet_down_blocks_0_conv", ("lora_down.weight", "lora_up.weight", "alpha", "lora_mid.weight")),
    ("lora_te1_text_model_fc1", ("lora_down.weight", "lora_up.weight", "alpha", "dora_scale")),
    ("unet.mid_block.to_q", ("lora_A.weight", "lora_B.weight", "alpha", "lora_magnitude_vector")),
    ("unet.mid_block.attn1.processor.to_out_lora", ("down.weight", "up.weight", "alpha")),
    ("text_encoder.layers.0.q_proj.lora_linear_layer", ("down.weight", "up.weight")),
    ("transformer.blocks.0.ff", ("lora_A.default.weight", "lora_B.default.weight", "hada_w1_a")),
    ("base_model.model.mid_block.to_q", ("lora_A.weight", "lora_B.weight")),
)  # fmt: skip
"""Module of a file, and the tensors that may lie beside one another in it."""
STORED = {
    "conv": ((2, 4, 3, 3), (4, 2, 1, 1)),
    "plain": ((2, 4), (4, 2)),
}
CONFIGS = {
    "unet.r": 2, "unet.lora_alpha": 4, "unet.rank_pattern": {"to_q": 2, r"mid.*\.to": 3}, "unet.alpha_pattern": {"to.*": 1},
    "unet.use_rslora": False, "text_encoder.r": 2, "text_encoder.lora_alpha": 2.0, "text_encoder.target_modules": ["q_proj"],
}  # fmt: skip
ODD_VALUES = (1e38, float("nan"), float("inf"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)


def drawn(rng: random.Random, tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> None:
    """Add a tensor of one value, now and then of another name, dtype or an odd value."""
    stored = name if rng.random() < 0.99 else f"{text(rng)}.{name.partition('.')[2]}"
    dtype = DTYPES[0] if rng.random() < 0.97 else rng.choice(DTYPES)
    value = rng.choice((1.0, 1.0, 2.0, 0.0, -3.0)) if rng.random() < 0.95 else rng.choice(ODD_VALUES)
    tensors[stored.encode("utf-8", "replace").decode()] = torch.full(shape, value).to(dtype)


def _shape(rng: random.Random, module: str, tensor: str) -> tuple[int, ...]:
    """What the tensor should have, now and then something else."""
    down, up = STORED["conv" if "conv" in module else "plain"]
    shape = () if "alpha" in tensor else up if "up" in tensor or "lora_B" in tensor else down
    if rng.random() < 0.01:
        return tuple(rng.choice((0, 1, 2, 3, 4)) for _ in range(rng.randrange(5)))
    return shape


def _file(rng: random.Random) -> Files:
    one_layout = FACTORS[:3] if rng.random() < 0.5 else FACTORS[3:]
    modules = one_layout if rng.random() < 0.8 else FACTORS
    has_alpha, tensors = rng.random() < 0.6, dict[str, torch.Tensor]()
    for module, names in rng.sample(modules, rng.randrange(1, 4)):
        for name in names:
            rare = 0.02 if "up" in name or "down" in name or "lora_A" in name or "lora_B" in name else 0.95
            if rng.random() < (0.05 if name == "alpha" and has_alpha else rare):
                continue
            drawn(rng, tensors, f"{module}.{name}", _shape(rng, module, name))
    metadata = {"format": "pt"}
    if rng.random() < (0.1 if has_alpha else 0.6):
        metadata[METADATA_KEY] = json_text(rng, CONFIGS).decode("utf-8", "replace")
    content = save(tensors, metadata)
    return {"lora.safetensors": mutated_bytes(rng, content) if rng.random() < 0.15 else content}


@cache
def _base() -> Model:
    """A base that has the modules above."""
    linear = ("unet.mid_block.to_q", "unet.mid_block.attn1.to_out.0", "text_encoder.text_model.fc1",
              "text_encoder.layers.0.q_proj", "transformer.blocks.0.ff")  # fmt: skip
    tensors = {f"{name}.weight": torch.ones(4, 4) for name in linear}
    return hold_model(tensors | {"unet.down_blocks.0.conv.weight": torch.ones(4, 4, 3, 3)})


def _read(folder: Path) -> str:
    if form_factors(folder):
        form(folder)
    return inspected(folder)


def form(folder: Path) -> None:
    """Form the deltas of a base that has the modules above."""
    with fit_expert(locate(folder), _base()) as expert:
        for name, spec in expert.specs.items():
            if expert.source(name).kind == "formed":
                expert.dense(name, 0, spec.numel, torch.float32)


door("LoRA files", _file, in_folder(_read))
