"""Tiny models and pipelines of diffusers, made from configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
VAE = {
    "block_out_channels": [8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "sample_size": 16,
}


def unet(**more: Any) -> Any:
    """A UNet of Stable Diffusion with two levels."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(**{**UNET, **more}).eval()


def vae() -> Any:
    """An autoencoder with two levels."""
    from diffusers import AutoencoderKL

    torch.manual_seed(1)
    return AutoencoderKL(**VAE).eval()


def text_encoder() -> Any:
    """A CLIP text model."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPTextConfig(
        **sizes, vocab_size=30, max_position_embeddings=8, bos_token_id=1, eos_token_id=2, pad_token_id=2
    )
    return CLIPTextModel(config).eval()


def tokenizer(folder: Path) -> Any:
    """A CLIP tokenizer of single letters."""
    from transformers import CLIPTokenizer

    folder.mkdir(parents=True)
    letters = [chr(97 + k) for k in range(13)]
    words = ["<|pad|>", "<|startoftext|>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters)]
    (folder / "vocab.json").write_text(json.dumps({w: k for k, w in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=8)


def pipeline(folder: Path) -> Any:
    """A Stable Diffusion pipeline without a safety checker."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    return StableDiffusionPipeline(
        vae=vae(), text_encoder=text_encoder(), tokenizer=tokenizer(folder), unet=unet(), scheduler=DDIMScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def moved(model: Any, seed: int, size: float = 0.02) -> Any:
    """The model with all parameters changed a little, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return model


def image_of(loaded: Any) -> torch.Tensor:
    """What a pipeline draws in one step."""
    loaded.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    out = loaded("a b", num_inference_steps=1, generator=generator, output_type="pt", height=16, width=16)
    found: torch.Tensor = out.images
    return found
