"""The models that documentation pages find: a tiny Llama, two experts and two adapters of it; models of the demo."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.helpers.checkpoint_files import save_lora
from tests.helpers.llama import LLAMA, noise, shapes_of, write_llama
from tests.helpers.repository import ROOT

RANK = 4
LAYER = "lora_unet_double_blocks_0_img_attn_proj"
"""Module of an image model."""
DIGITS = ROOT / "tests" / "data" / "digits"


def write_models(directory: Path) -> None:
    """`base`, `experts/math`, `experts/code` (bfloat16 Llamas), `adapters/math`, `adapters/code` (LoRA, rank 4).

    And `ink.safetensors`, `oil.safetensors` (LoRA of an image model) and `demo-output`, with base and two experts
    that `actmat demo` trained on scanned digits.
    """
    shutil.copytree(DIGITS, directory / "demo-output")
    write_llama(directory / "base")
    for number, name in enumerate(("math", "code")):
        write_llama(directory / "experts" / name, expert=number)
        write_adapter(directory / "adapters" / name, seed=number)
    for number, name in enumerate(("ink", "oil"), 1):
        save_image_lora(directory / f"{name}.safetensors", number)


def save_image_lora(file: Path, value: float) -> Path:
    """A LoRA file of rank 2 in kohya's names, whose delta is `2 * value` everywhere."""
    down, up = torch.ones(2, 8), torch.full((8, 2), float(value))
    alpha = torch.tensor(2.0)
    save_file({f"{LAYER}.lora_down.weight": down, f"{LAYER}.lora_up.weight": up, f"{LAYER}.alpha": alpha}, file)
    return file


def write_adapter(folder: Path, *, seed: int) -> None:
    """A LoRA adapter of `q_proj` and `v_proj` in PEFT's format."""
    factors = {
        name.removesuffix(".weight"): (
            noise(name + "A", (RANK, shape[1]), seed).mul_(0.1),
            noise(name + "B", (shape[0], RANK), seed).mul_(0.01),
        )
        for name, shape in shapes_of(LLAMA).items()
        if "q_proj" in name or "v_proj" in name
    }
    fields = {"base_model_name_or_path": "base", "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False}
    save_lora(folder, factors, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **fields)
