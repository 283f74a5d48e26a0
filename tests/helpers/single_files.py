"""Tiny models of diffusers in the layouts of their own tools: the inverse of diffusers' maps, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.helpers.diffusion import UNET_NAMES, ldm_name, moved, single_file, text_encoder, unet, vae
from torch import Tensor

State = dict[str, Tensor]

SDXL = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 36,
        "transformer_layers_per_block": 2, "use_linear_projection": True}  # fmt: skip
OPEN_CLIP = {
    "encoder.layers.": "transformer.resblocks.",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    ".fc1.": ".c_fc.",
    ".fc2.": ".c_proj.",
    "self_attn": "attn",
    "final_layer_norm": "ln_final",
    "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.token_embedding": "token_embedding",
}
SD3 = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj": "x_embedder.proj",
    "context_embedder": "context_embedder",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}
SD3_BLOCK = {
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn2.norm_q": "x_block.attn2.ln_q",
    "attn2.norm_k": "x_block.attn2.ln_k",
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn2.to_out.0": "x_block.attn2.proj",
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
}
SD3_PACKED = {
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
}
WAN = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "attn2": "cross_attn",
    "attn1": "self_attn",
    ".to_out.0.": ".o.",
    ".to_q.": ".q.",
    ".to_k.": ".k.",
    ".to_v.": ".v.",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    ".norm2.": ".norm3.",
}


def second_text_encoder(width: int = 24) -> Any:
    """A CLIP text model with a projection."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(3)
    sizes = {"hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return CLIPTextModelWithProjection(CLIPTextConfig(
        **sizes, vocab_size=30, max_position_embeddings=8, projection_dim=20, bos_token_id=1, eos_token_id=2,
        pad_token_id=2,
    )).eval()  # fmt: skip


def t5() -> Any:
    """A T5 encoder."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(4)
    return T5EncoderModel(T5Config(d_model=16, d_ff=24, d_kv=4, num_heads=2, num_layers=1, vocab_size=30)).eval()


def sd3() -> Any:
    """A transformer of Stable Diffusion 3.5, with dual attention in its first block."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(5)
    return SD3Transformer2DModel(
        sample_size=4, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=2,
        joint_attention_dim=8, caption_projection_dim=8, pooled_projection_dim=6, out_channels=4, pos_embed_max_size=4,
        qk_norm="rms_norm", dual_attention_layers=(0,),
    ).eval()  # fmt: skip


def wan() -> Any:
    """A transformer of Wan 2.1, text to video."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(6)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
        freq_dim=8, ffn_dim=16, num_layers=2,
    ).eval()  # fmt: skip


def swapped(tensor: Tensor) -> Tensor:
    """Scale and shift in the other order."""
    return torch.cat(tuple(reversed(tensor.chunk(2))))


def _renamed(name: str, names: dict[str, str]) -> str:
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def open_clip_file(model: Any, prefix: str) -> State:
    """A CLIP text model in the layout of open_clip."""
    out, attention = {}, {}
    for name, tensor in model.state_dict().items():
        inner = name.removeprefix("text_model.")
        if "position_ids" in inner:
            continue
        if inner == "text_projection.weight":
            out["text_projection"] = tensor.T
            continue
        found = _renamed(inner, OPEN_CLIP)
        for k, letter in enumerate("qkv"):
            if f".{letter}_proj." in found:
                stem = found.replace(f".{letter}_proj.", ".in_proj_")
                attention.setdefault(stem, [tensor] * 3)[k] = tensor
        if "_proj." not in found or "out_proj" in found or "c_proj" in found:
            out[found] = tensor
    out |= {name: torch.cat(parts) for name, parts in attention.items()}
    return {prefix + n: t for n, t in out.items()}


def sdxl_file(parts: dict[str, Any]) -> State:
    """Components of a pipeline of Stable Diffusion XL in one file."""
    from types import SimpleNamespace

    plain = single_file(SimpleNamespace(unet=parts["unet"], vae=parts["vae"], text_encoder=parts["text_encoder"]))
    names = UNET_NAMES | {"label_emb.0.0": "add_embedding.linear_1", "label_emb.0.2": "add_embedding.linear_2"}
    out = {n: t for n, t in plain.items() if n.startswith("first_stage_model.")}
    clip = "cond_stage_model."
    out |= {f"conditioner.embedders.0.{n.removeprefix(clip)}": t for n, t in plain.items() if n.startswith(clip)}
    out |= {f"model.diffusion_model.{ldm_name(n, names)}": t for n, t in parts["unet"].state_dict().items()}
    return out | open_clip_file(parts["text_encoder_2"], "conditioner.embedders.1.model.")


def sd3_file(parts: dict[str, Any]) -> State:
    """Components of a pipeline of Stable Diffusion 3 in one file."""
    state, out = dict(parts["transformer"].state_dict()), {}
    last = max(int(n.split(".")[1]) for n in state if n.startswith("transformer_blocks."))
    for name, tensor in state.items():
        stem, _, leaf = name.rpartition(".")
        if not name.startswith("transformer_blocks."):
            whole = name in SD3
            value = swapped(tensor) if stem == "norm_out.linear" else tensor
            out[SD3[name] if whole else f"{SD3[stem]}.{leaf}"] = value
            continue
        _, number, inner = stem.split(".", 2)
        if inner in SD3_BLOCK:
            value = swapped(tensor) if inner == "norm1_context.linear" and int(number) == last else tensor
            out[f"joint_blocks.{number}.{SD3_BLOCK[inner]}.{leaf}"] = value
        for packed, names in SD3_PACKED.items():
            if inner == names[0]:
                beside = [state[f"transformer_blocks.{number}.{n}.{leaf}"] for n in names]
                out[f"joint_blocks.{number}.{packed}.{leaf}"] = torch.cat(beside)
    out = {f"model.diffusion_model.{n}": t for n, t in out.items()}
    for component, prefix in (("text_encoder", "clip_l"), ("text_encoder_2", "clip_g"), ("text_encoder_3", "t5xxl")):
        start = f"text_encoders.{prefix}.transformer."
        for name, tensor in parts[component].state_dict().items():
            inner = name if prefix == "t5xxl" or name.startswith(("text_model.", "text_proj")) else f"text_model.{name}"
            if inner != "encoder.embed_tokens.weight":
                out[start + inner] = tensor
    return out


def wan_file(model: Any) -> State:
    """A transformer of Wan in the layout of its own tool."""
    out = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(("scale_shift_table", "proj_out")):
            found = name.replace("scale_shift_table", "head.modulation").replace("proj_out", "head.head")
        else:
            found = _renamed(name, WAN | {"scale_shift_table": "modulation"})
        out[found] = tensor
    return out


def flux_file(seed: int, columns: int = 2) -> State:
    """One block of each kind of Flux with all rows, which diffusers' map counts, and few columns."""
    width, inner = 3072, 12288
    sizes = {"img_in": width, "txt_in": width, "final_layer.linear": 64, "final_layer.adaLN_modulation.1": 2 * width}
    sizes |= {f"{n}.{k}_layer": width for n in ("time_in", "vector_in") for k in ("in", "out")}
    for side in ("img", "txt"):
        block = f"double_blocks.0.{side}"
        sizes |= {f"{block}_mod.lin": 6 * width, f"{block}_attn.qkv": 3 * width, f"{block}_attn.proj": width}
        sizes |= {f"{block}_mlp.0": inner, f"{block}_mlp.2": width}
    single = "single_blocks.0"
    sizes |= {f"{single}.linear1": 3 * width + inner, f"{single}.linear2": width, f"{single}.modulation.lin": 3 * width}
    generator = torch.Generator().manual_seed(seed)
    out = {f"{n}.weight": torch.randn(rows, columns, generator=generator) for n, rows in sizes.items()}
    out |= {f"{n}.bias": torch.randn(rows, generator=generator) for n, rows in sizes.items()}
    norms = [f"double_blocks.0.{side}_attn" for side in ("img", "txt")] + [single]
    return out | {
        f"{n}.norm.{k}_norm.scale": torch.rand(128, generator=generator) for n in norms for k in ("query", "key")
    }


def converted_flux(state: State) -> State:
    """The same by diffusers' own map."""
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    return {n: t.contiguous() for n, t in convert_flux_transformer_checkpoint_to_diffusers(dict(state)).items()}


def save_pipeline(folder: Path, kind: str, parts: dict[str, Any]) -> None:
    """A folder with an index and these components."""
    folder.mkdir()
    libraries = {name: ["diffusers" if "diffusers" in type(m).__module__ else "transformers", type(m).__name__]
                 for name, m in parts.items()}  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps({"_class_name": kind, **libraries}))
    for name, model in parts.items():
        model.save_pretrained(folder / name)


def write_both(home: Path, name: str, kind: str, seed: int) -> None:
    """`home/NAME` and `home/NAME.safetensors`: one model in both layouts, moved by the seed where it is not 0."""
    if kind == "flux":
        state = flux_file(seed)
        folder = home / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
        save_file(converted_flux(state), folder / "diffusion_pytorch_model.safetensors")
    elif kind == "wan":
        model = moved(wan(), seed) if seed else wan()
        model.save_pretrained(home / name)
        state = wan_file(model)
    else:
        parts = {"text_encoder": text_encoder(), "text_encoder_2": second_text_encoder()}
        more = (
            {"unet": unet(**SDXL), "vae": vae()} if kind == "sdxl" else {"transformer": sd3(), "text_encoder_3": t5()}
        )
        parts |= more
        for model in parts.values() if seed else ():
            moved(model, seed)
        save_pipeline(home / name, "StableDiffusionXLPipeline" if kind == "sdxl" else "StableDiffusion3Pipeline", parts)
        state = sdxl_file(parts) if kind == "sdxl" else sd3_file(parts)
    save_file({n: t.clone().contiguous() for n, t in state.items()}, home / f"{name}.safetensors")
