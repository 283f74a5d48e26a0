"""Tiny UNets and LoRA files of diffusion models in all layouts, and what diffusers makes of them."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.helpers.diffusion import text_encoder, unet
from torch import Tensor

UNET = (
    "down_blocks.0.attentions.0.proj_in",
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
    "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k",
    "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0",
    "mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj",
    "mid_block.resnets.0.conv1",
)
TEXT = ("text_model.encoder.layers.0.self_attn.q_proj", "text_model.encoder.layers.0.mlp.fc1")


def tiny_unet() -> Any:
    """A float64 UNet with fixed weights."""
    return unet(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
    ).double()


def tiny_text() -> Any:
    """A float64 CLIP text encoder with fixed weights."""
    return text_encoder().double()


@dataclass(frozen=True)
class Factors:
    """The factors of one module, with the scale that a file states for it."""

    a: Tensor
    b: Tensor
    alpha: float

    @property
    def delta(self) -> Tensor:
        """`alpha / rank * B A`, a kernel flattened into the inputs."""
        return self.b.flatten(1) @ self.a.flatten(1) * (self.alpha / self.a.shape[0])


def weights_of(model: Any) -> dict[str, Tensor]:
    """Its parameters; a text encoder's with the prefix that files of adapters have."""
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    is_text = "CLIP" in type(model).__name__ and not any(n.startswith("text_model.") for n in state)
    return {f"text_model.{n}": t for n, t in state.items()} if is_text else state


def random_factors(model: Any, names: tuple[str, ...], seed: int, *, alpha: float | None = None) -> dict[str, Factors]:
    """Factors of ranks 2 and 3 for these modules; with `alpha` None the scale is 1."""
    rng, out, state = torch.Generator().manual_seed(seed), {}, weights_of(model)
    for i, name in enumerate(names):
        rows, columns, *kernel = state[f"{name}.weight"].shape
        rank = 2 + i % 2
        a = torch.randn(rank, columns, *kernel, generator=rng, dtype=torch.float64)
        b = torch.randn(rows, rank, *(1 for _ in kernel), generator=rng, dtype=torch.float64)
        out[name] = Factors(a, b, float(rank) if alpha is None else alpha)
    return out


def save_kohya(file: Path, unet: Mapping[str, Factors], text: Mapping[str, Factors] | None = None) -> Path:
    """A file as kohya's trainers write it."""
    tensors = {}
    for prefix, modules in (("lora_unet_", unet), ("lora_te_", text or {})):
        for name, own in modules.items():
            flat = prefix + name.replace(".", "_")
            tensors[f"{flat}.lora_down.weight"], tensors[f"{flat}.lora_up.weight"] = own.a, own.b
            tensors[f"{flat}.alpha"] = torch.tensor(own.alpha, dtype=torch.float64)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, {"ss_network_module": "networks.lora"})
    return file


def save_diffusers(folder: Path, unet: Mapping[str, Factors], text: Mapping[str, Factors], **options: Any) -> Path:
    """A folder as `save_lora_weights` of diffusers writes it, in float64."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin

    def layers(modules: Mapping[str, Factors]) -> dict[str, Tensor]:
        pairs = [(n, side, t) for n, own in modules.items() for side, t in (("A", own.a), ("B", own.b))]
        return {f"{n}.lora_{side}.weight": t for n, side, t in pairs}

    StableDiffusionLoraLoaderMixin.save_lora_weights(
        folder, unet_lora_layers=layers(unet), text_encoder_lora_layers=layers(text) or None, **options
    )
    return folder


def fused_by_diffusers(location: Path, model: Any) -> dict[str, Tensor]:
    """The UNet's weights after diffusers has loaded the file and fused it."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin as Loader

    where = {"weight_name": location.name} if location.is_file() else {}
    folder = str(location.parent if location.is_file() else location)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, alphas, metadata = Loader.lora_state_dict(folder, return_lora_metadata=True, **where)
        Loader.load_lora_into_unet(state, alphas, model, metadata=metadata)
        model.fuse_lora()
    fused = {n.replace(".base_layer", ""): t.detach() for n, t in model.state_dict().items() if ".lora_" not in n}
    return {n: t.clone() for n, t in fused.items()}


def added(base: Mapping[str, Tensor], modules: Mapping[str, Factors], weight: float = 1.0) -> dict[str, Tensor]:
    """The base with the deltas of these modules."""
    out = {n: t.clone() for n, t in base.items()}
    for name, own in modules.items():
        target = out[f"{name}.weight"]
        target += weight * own.delta.reshape(target.shape)
    return out


def written(folder: Path) -> dict[str, Tensor]:
    """The tensors of the only weight file of an output."""
    (file,) = folder.glob("*.safetensors")
    return dict(load_file(file))
