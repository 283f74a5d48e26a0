"""Tiny PEFT adapters with every option, and what PEFT itself makes of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from tests.helpers.checkpoint_files import save_folder
from tests.helpers.tinymodels import made
from torch import Tensor, nn


class Vision(nn.Module):
    """Convolutions, a linear layer, torch's own attention; no transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(3, 6, 3)
        self.plane = nn.Conv2d(4, 8, 3)
        self.point = nn.Conv2d(4, 8, 1)
        self.solid = nn.Conv3d(2, 4, 2)
        self.head = nn.Linear(6, 5)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)


LLAMA_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": 30}  # fmt: skip
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
MIXTURE = {**LLAMA_SIZES, **HEADS, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
SIZES: dict[str, dict[str, Any]] = {
    "llama": LLAMA_SIZES,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 30, "n_positions": 16},
    "mixtral": {**LLAMA_SIZES, "num_local_experts": 3, "num_experts_per_tok": 2},
    "olmoe": {**MIXTURE, "intermediate_size": 8, "pad_token_id": 0, "eos_token_id": 0},  # its gate_up_proj is 16 x 16
    "qwen3_moe": {**MIXTURE, "head_dim": 8, "moe_intermediate_size": 12},
    "deepseek_v3": {**LLAMA_SIZES, **HEADS, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 2,
                    "n_routed_experts": 4, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
                    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    "vit": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 8, "patch_size": 4},
}  # fmt: skip


def tiny(family: str) -> Any:
    """A float64 model with fixed weights."""
    torch.manual_seed(0)
    return (Vision() if family == "vision" else made(family, **SIZES[family])).double().eval()


def save_base(family: str, folder: Path, dtype: torch.dtype = torch.float64) -> Path:
    """The tiny model as a checkpoint, whatever class it has."""
    model = tiny(family).to(dtype)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        save_folder(folder, model.state_dict())
    return folder


def save_adapter(folder: Path, family: str, seed: int, **options: Any) -> dict[str, Tensor]:
    """Write a LoRA adapter with random factors, see `save_peft`."""
    return save_peft(folder, family, seed, LoraConfig(**options))


def save_peft(
    folder: Path, family: str, seed: int, config: PeftConfig, *, dtype: torch.dtype = torch.float64, scale: float = 0.3
) -> dict[str, Tensor]:
    """Write an adapter with random changes of all that it trains; the state dict of PEFT's own merged model.

    Other trained tensors (`modules_to_save`, biases) get random values too.
    """
    model = get_peft_model(tiny(family).to(dtype), config)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ".ranknum." not in name:  # AdaLoRA's rank, which PEFT does not save
                noise = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
                parameter.add_((scale * noise).to(parameter.dtype))
    model.save_pretrained(folder)
    merged = model.merge_and_unload()
    return {name: value.clone() for name, value in merged.state_dict().items()}


STACKS = {"r": 2, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
"""An adapter of a mixture's experts."""


def save_groups(folder: Path, families: Mapping[str, Sequence[dict[str, Any]]]) -> Path:
    """Per family: its base, adapters `a1`, `a2`, ..., and the same experts as full models, `m1`, `m2`, ..."""
    for family, adapters in families.items():
        model = tiny(family)
        model.save_pretrained(folder / family / "base")
        for n, options in enumerate(adapters, 1):
            model.load_state_dict(save_adapter(folder / family / f"a{n}", family, n, **options))
            model.save_pretrained(folder / family / f"m{n}")
    return folder


LLAMA = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
"""A plain adapter of the tiny Llama."""


class InOneFolder:
    """Tests of a class that store adapters in one folder: adapters are only read, so that one serves all of them."""

    shared: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _shared_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.shared = tmp_path_factory.mktemp("adapters")
