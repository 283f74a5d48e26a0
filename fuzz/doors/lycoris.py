"""Door of LyCORIS's files: LoHa, LoKr, (IA)^3, and kohya's LoRA with a core of a kernel or magnitudes."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import save

from fuzz.doors.folder import in_folder, inspected
from fuzz.doors.lora_files import drawn, form
from fuzz.draw import mutated_bytes
from fuzz.harness import Files, door

Shapes = dict[str, tuple[int, ...]]
PLAIN, KERNEL = "lora_unet_mid_block_to_q", "lora_unet_down_blocks_0_conv"
MODULES: tuple[tuple[str, Shapes], ...] = (
    (PLAIN, {"hada_w1_a": (4, 2), "hada_w1_b": (2, 4), "hada_w2_a": (4, 2), "hada_w2_b": (2, 4), "alpha": ()}),
    (PLAIN, {"lokr_w1": (2, 2), "lokr_w2": (2, 2), "alpha": (), "dora_scale": (4, 1)}),
    (PLAIN, {"lokr_w1": (2, 2), "lokr_w2_a": (2, 1), "lokr_w2_b": (1, 2), "alpha": ()}),
    (PLAIN, {"lokr_w1_a": (2, 1), "lokr_w1_b": (1, 2), "lokr_w2": (2, 2), "alpha": (), "dora_scale": (1, 4)}),
    (PLAIN, {"weight": (4,), "on_input": ()}),
    (PLAIN, {"lora_down.weight": (2, 4), "lora_up.weight": (4, 2), "alpha": (), "dora_scale": (4, 1)}),
    (KERNEL, {"hada_w1_a": (2, 4), "hada_w1_b": (2, 4), "hada_w2_a": (2, 4), "hada_w2_b": (2, 4),
              "hada_t1": (2, 2, 3, 3), "hada_t2": (2, 2, 3, 3), "alpha": ()}),
    (KERNEL, {"hada_w1_a": (4, 2), "hada_w1_b": (2, 36), "hada_w2_a": (4, 2), "hada_w2_b": (2, 36), "alpha": ()}),
    (KERNEL, {"lokr_w1": (2, 2), "lokr_w2_a": (2, 2), "lokr_w2_b": (2, 2), "lokr_t2": (2, 2, 3, 3), "alpha": ()}),
    (KERNEL, {"lora_down.weight": (2, 4, 1, 1), "lora_up.weight": (4, 2, 1, 1), "lora_mid.weight": (2, 2, 3, 3)}),
    ("lora_te1_text_model_fc1", {"hada_w1_a": (4, 2), "hada_w1_b": (2, 4), "hada_w2_a": (4, 2), "hada_w2_b": (2, 4)}),
    ("lycoris_mid_block_to_q", {"lokr_w1": (4, 1), "lokr_w2": (1, 4), "diff": (4, 4)}),
)  # fmt: skip
"""A module, its tensors and their shapes, for layers of 4 outputs and 4 inputs."""


def _file(rng: random.Random) -> Files:
    tensors: dict[str, torch.Tensor] = {}
    for module, shapes in rng.sample(MODULES, rng.choice((1, 1, 2, 3))):
        for name, shape in shapes.items():
            kind = rng.random()
            if kind < 0.03 or (name == "diff" and kind < 0.9):
                continue
            own = tuple(rng.choice((0, 1, 2, 3, 4)) for _ in range(rng.randrange(5))) if kind < 0.06 else shape
            drawn(rng, tensors, f"{module}.{name}", own)
    content = save(tensors, {"format": "pt", "ss_network_module": "lycoris.kohya"})
    return {"lora.safetensors": mutated_bytes(rng, content) if rng.random() < 0.15 else content}


def _read(folder: Path) -> str:
    form(folder)
    return inspected(folder, json=False)


door("LyCORIS files", _file, in_folder(_read))
