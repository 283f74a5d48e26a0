"""Tiny models and pipelines of diffusers, made from configs."""

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
    sizes |= {"vocab_size": 30, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    return CLIPTextModel(CLIPTextConfig(**sizes)).eval()


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


# The names of CompVis' latent diffusion code for the models above, written down by hand from its modules.
RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
BLOCKS = {
    "input_blocks.1.0": "down_blocks.0.resnets.0",
    "input_blocks.3.0": "down_blocks.1.resnets.0",
    "middle_block.0": "mid_block.resnets.0",
    "middle_block.2": "mid_block.resnets.1",
    "output_blocks.0.0": "up_blocks.0.resnets.0",
    "output_blocks.1.0": "up_blocks.0.resnets.1",
    "output_blocks.2.0": "up_blocks.1.resnets.0",
    "output_blocks.3.0": "up_blocks.1.resnets.1",
}
UNET_NAMES = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
    "input_blocks.2.0.op": "down_blocks.0.downsamplers.0.conv",
    "input_blocks.3.1": "down_blocks.1.attentions.0",
    "middle_block.1": "mid_block.attentions.0",
    "output_blocks.0.1": "up_blocks.0.attentions.0",
    "output_blocks.1.1": "up_blocks.0.attentions.1",
    "output_blocks.1.2.conv": "up_blocks.0.upsamplers.0.conv",
    **{f"{a}.{x}": f"{b}.{y}" for a, b in BLOCKS.items() for x, y in RESNET.items()},
}
VAE_NAMES = {
    **{f"{c}.mid.block_{k + 1}": f"{c}.mid_block.resnets.{k}" for c in ("encoder", "decoder") for k in (0, 1)},
    **{f"{c}.norm_out": f"{c}.conv_norm_out" for c in ("encoder", "decoder")},
    **{
        f"{c}.mid.attn_1.{x}": f"{c}.mid_block.attentions.0.{y}"
        for c in ("encoder", "decoder")
        for x, y in (("norm", "group_norm"), ("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0"))
    },
    **{f"encoder.down.{k}.block": f"encoder.down_blocks.{k}.resnets" for k in (0, 1)},
    "encoder.down.0.downsample.conv": "encoder.down_blocks.0.downsamplers.0.conv",
    **{f"decoder.up.{1 - k}.block": f"decoder.up_blocks.{k}.resnets" for k in (0, 1)},
    "decoder.up.1.upsample.conv": "decoder.up_blocks.0.upsamplers.0.conv",
}


def ldm_name(name: str, names: dict[str, str]) -> str:
    """Name of a diffusers tensor in the LDM code."""
    hits = [(theirs, ours) for theirs, ours in names.items() if name.startswith(f"{ours}.")]
    if not hits:
        return name
    theirs, ours = max(hits, key=lambda pair: len(pair[1]))
    return theirs + name.removeprefix(ours)


def single_file(loaded: Any) -> dict[str, torch.Tensor]:
    """The tensors of a pipeline in the layout of a Stable Diffusion 1 file."""
    out = {f"model.diffusion_model.{ldm_name(n, UNET_NAMES)}": t for n, t in loaded.unet.state_dict().items()}
    for name, tensor in loaded.vae.state_dict().items():
        kernel = ".attentions.0.to_" in name and tensor.ndim == 2
        value = tensor[:, :, None, None] if kernel else tensor
        out[f"first_stage_model.{ldm_name(name, VAE_NAMES)}"] = value
    for name, tensor in loaded.text_encoder.state_dict().items():
        out[f"cond_stage_model.transformer.text_model.{name.removeprefix('text_model.')}"] = tensor
    out["alphas_cumprod"] = torch.linspace(1, 0, 10)
    return {n: t.clone().contiguous() for n, t in out.items()}
