"""The models that documentation pages find: a tiny Llama, two experts and two adapters of it; models of the demo."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
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
    folder.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, (out_features, in_features) in ((n, s) for n, s in shapes_of(LLAMA).items() if len(s) == 2):
        if "q_proj" in name or "v_proj" in name:
            key = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{key}.lora_A.weight"] = noise(name + "A", (RANK, in_features), seed).mul_(0.1)
            tensors[f"{key}.lora_B.weight"] = noise(name + "B", (out_features, RANK), seed).mul_(0.01)
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
