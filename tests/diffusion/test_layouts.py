"""LoRA of image and video models in the names of diffusers, kohya and ComfyUI: the same deltas."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from tests.tolerances import F32_ELEMENTWISE, F32_PRODUCT
from torch import Tensor

from actmat.errors import CheckpointError
from actmat.extras.diffusion.architectures import ARCHITECTURES, ImageArchitecture
from actmat.extras.diffusion.layouts import convert_lora

OF = {a.name: a for a in ARCHITECTURES}
WIDTH = {"Flux": 3072, "Stable Diffusion 3": 1536, "SDXL": 2048, "Stable Diffusion 1": 768}
NAMES: dict[str, list[str]] = {
    "SDXL": [
        "input_blocks.4.1.transformer_blocks.1.attn2.to_k", "input_blocks.3.0.op", "middle_block.1.proj_in",
        "output_blocks.2.2.conv", "output_blocks.0.1.transformer_blocks.9.attn1.to_out.0",
        "output_blocks.5.0.in_layers.2", "input_blocks.7.0.skip_connection", "middle_block.2.emb_layers.1",
        "time_embed.2", "label_emb.0.0",
    ],
    "Stable Diffusion 1": [
        "input_blocks.1.1.transformer_blocks.0.attn2.to_k", "output_blocks.2.1.conv", "output_blocks.5.2.conv",
        "middle_block.0.out_layers.3", "output_blocks.11.1.transformer_blocks.0.ff.net.0.proj", "input_blocks.9.0.op",
    ],
    "Flux": [
        "double_blocks.0.img_attn.qkv", "double_blocks.18.txt_attn.qkv", "double_blocks.1.img_attn.proj",
        "double_blocks.1.txt_mlp.0", "double_blocks.1.img_mod.lin",
        "single_blocks.37.linear1", "single_blocks.0.linear2", "single_blocks.3.modulation.lin",
        "final_layer.adaLN_modulation.1",
    ],
    "Stable Diffusion 3": [
        "joint_blocks.0.x_block.attn.qkv", "joint_blocks.0.context_block.attn.qkv", "joint_blocks.23.x_block.attn2.qkv",
        "joint_blocks.1.x_block.mlp.fc1", "joint_blocks.23.context_block.adaLN_modulation.1",
        "joint_blocks.2.context_block.adaLN_modulation.1", "final_layer.adaLN_modulation.1", "x_embedder.proj",
    ],
    "Wan": [
        "blocks.0.self_attn.q", "blocks.39.cross_attn.k_img", "blocks.39.cross_attn.v_img", "blocks.1.cross_attn.o",
        "blocks.2.ffn.0", "time_projection.1", "text_embedding.2", "head.head",
    ],
    "Qwen-Image": [
        "transformer_blocks.59.attn.add_q_proj", "transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.1.img_mlp.net.0.proj", "transformer_blocks.2.txt_mod.1",
    ],
}  # fmt: skip
"""Original names of some modules of every kind."""


def rows_of(architecture: ImageArchitecture, name: str, width: int) -> int:
    """Rows of a module, as many as its parts have, or three times its columns; shift and scale have two."""
    parts = architecture.originals[name]
    two = parts.is_swapped and not name.startswith("joint_blocks.2.")
    return width * (sum(parts.rows) or (2 if two else 3))


def original(kind: str, layout: str, seed: int = 0, rank: int = 2, *, dtype: torch.dtype = torch.float64,
             alpha: float | None = 1.0) -> dict[str, Tensor]:  # fmt: skip
    """A file in names of the original code, kohya's or ComfyUI's."""
    rng, out = torch.Generator().manual_seed(seed), {}
    width = WIDTH.get(kind, 8)
    for i, name in enumerate(NAMES[kind]):
        stored = f"diffusion_model.{name}" if layout == "comfy" else f"lora_unet_{name.replace('.', '_')}"
        kernel = (3, 3) if name.endswith(("op", "conv", "in_layers.2", "out_layers.3")) else ()
        r = rank * (1 + i % 2)  # powers of two, by which scales are exact
        a = torch.randn(r, width, *kernel, generator=rng, dtype=torch.float64)
        b = torch.randn(rows_of(OF[kind], name, width), r, *((1, 1) if kernel else ()), generator=rng, dtype=a.dtype)
        out |= {f"{stored}.lora_down.weight": a.to(dtype), f"{stored}.lora_up.weight": b.to(dtype)}
        if alpha is not None:
            out[f"{stored}.alpha"] = torch.tensor(alpha)
    return out


def products(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Module -> its delta times a fixed vector (times two of them: exact up to rounding), by any names of factors."""
    out = {}
    for name, a in tensors.items():
        if name.endswith((".lora_down.weight", ".lora_A.weight", ".down.weight")):
            up = name.replace("lora_down", "lora_up").replace("lora_A", "lora_B").replace(".down.", ".up.")
            module = name.split(".lora_down")[0].split(".lora_A")[0].split(".lora.down")[0].split("_lora.down")[0]
            alpha = tensors.get(f"{module}.alpha", torch.tensor(float(a.shape[0])))
            vector = torch.linspace(-1, 1, a[0].numel(), dtype=torch.float64) ** 3 + 0.1
            b = tensors[up].double().flatten(1)
            out[module] = b @ (a.double().flatten(1) @ vector) * (float(alpha) / a.shape[0])
    return out


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def naive(kind: str, products_of_original: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Products by diffusers' names, written out: rows one after the other, halves exchanged."""
    architecture, width, out = OF[kind], WIDTH.get(kind, 8), {}
    for name, value in products_of_original.items():
        parts = architecture.originals[name.removeprefix("diffusion_model.")]
        if parts.is_swapped and len(value) == 2 * width:
            shift, scale = value.chunk(2)
            value = torch.cat([scale, shift])
        sizes = [n * width for n in parts.rows] or [len(value)]
        for path, part in zip(parts.paths, value.split(sizes), strict=True):
            out[f"{architecture.component}.{path}"] = part
    return out


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("start", ["kohya", "comfy"])
def test_deltas_are_the_same_in_every_layout(kind: str, start: str) -> None:
    """Original names to diffusers' and back; kohya's and ComfyUI's to each other bit by bit."""
    file = original(kind, start)
    if start == "kohya" and OF[kind].kohya_is_diffusers:
        file = convert_lora(original(kind, "comfy"), "kohya")
        assert all(n.startswith("lora_unet_down_blocks") or "_block" in n for n in file)
    comfy = convert_lora(file, "comfy")
    close(products(comfy), products(original(kind, "comfy")))
    close(products(convert_lora(file, "diffusers")), naive(kind, products(comfy)))
    again = convert_lora(convert_lora(comfy, "kohya"), "comfy")
    assert again.keys() == comfy.keys()
    assert all(torch.equal(again[n].double(), comfy[n].double()) for n in again)
    close(products(convert_lora(convert_lora(file, "diffusers"), "comfy")), products(comfy))


@pytest.mark.parametrize("kind", NAMES)
def test_diffusers_names_come_back_bit_by_bit(kind: str) -> None:
    """Separate factors, stacked into blocks and taken apart, are what they were: no rank is added."""
    rng = torch.Generator().manual_seed(1)
    file = {}
    for name, tensor in convert_lora(original(kind, "comfy"), "diffusers").items():
        file[name] = torch.randn(tensor.shape, generator=rng)
    for layout in ("kohya", "comfy"):
        again = convert_lora(convert_lora(file, layout), "diffusers")
        assert again.keys() == file.keys()
        assert [n for n in file if not torch.equal(again[n], file[n])] == []


SMALL = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
JOINT = SMALL | {"joint_attention_dim": 8, "pooled_projection_dim": 8}
UNET = {"norm_num_groups": 4, "cross_attention_dim": 8, "attention_head_dim": 2}
DOWN, UP = "DownBlock2D", "UpBlock2D"
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "Flux": ("FluxTransformer2DModel", JOINT | {
        "num_single_layers": 1, "in_channels": 4, "guidance_embeds": True, "axes_dims_rope": (2, 2, 4)}),
    "Stable Diffusion 3": ("SD3Transformer2DModel", JOINT | {
        "num_layers": 2, "sample_size": 4, "caption_projection_dim": 16, "dual_attention_layers": (0,)}),
    "Wan": ("WanTransformer3DModel", SMALL | {
        "text_dim": 8, "freq_dim": 8, "ffn_dim": 8, "image_dim": 8, "added_kv_proj_dim": 16}),
    "Qwen-Image": ("QwenImageTransformer2DModel", SMALL | {"joint_attention_dim": 8, "axes_dims_rope": (2, 2, 4)}),
    "SDXL": ("UNet2DConditionModel", UNET | {
        "block_out_channels": (8, 16, 16), "use_linear_projection": True, "transformer_layers_per_block": (1, 2, 10),
        "down_block_types": (DOWN, f"CrossAttn{DOWN}", f"CrossAttn{DOWN}"), "addition_time_embed_dim": 2,
        "up_block_types": (f"CrossAttn{UP}", f"CrossAttn{UP}", UP), "addition_embed_type": "text_time",
        "projection_class_embeddings_input_dim": 12}),
    "Stable Diffusion 1": ("UNet2DConditionModel", UNET | {
        "block_out_channels": (8, 8, 16, 16), "down_block_types": (*[f"CrossAttn{DOWN}"] * 3, DOWN),
        "up_block_types": (UP, *[f"CrossAttn{UP}"] * 3)}),
}  # fmt: skip
"""Architecture -> a class of diffusers, and what makes a tiny model of it."""


@pytest.mark.parametrize("kind", [a.name for a in ARCHITECTURES])
def test_every_layer_of_the_real_models_has_a_name(kind: str) -> None:
    import diffusers

    name, fields = TINY[kind.replace("Diffusion 2", "Diffusion 1")]
    with torch.device("meta"):
        model = getattr(diffusers, name)(**fields)
    found = [n for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv2d", "Conv3d")]
    assert len(found) > 10
    assert [n for n in found if n not in OF[kind].paths] == []


def of_diffusers(kind: str, file: dict[str, Tensor]) -> dict[str, Tensor]:
    """What diffusers' own loader makes of a file."""
    from diffusers.loaders import lora_conversion_utils as utils

    file = {n: t.clone() for n, t in file.items()}  # it multiplies in place
    if kind == "Flux":
        return utils._convert_kohya_flux_lora_to_diffusers(file)
    if kind == "Wan":
        return utils._convert_non_diffusers_wan_lora_to_diffusers(file)
    if kind == "Qwen-Image":
        return utils._convert_non_diffusers_qwen_lora_to_diffusers(file)
    from types import SimpleNamespace

    mapped = utils._maybe_map_sgm_blocks_to_diffusers(file, SimpleNamespace(layers_per_block=2))
    converted, alphas = utils._convert_non_diffusers_lora_to_diffusers(mapped)
    ranks = {n: t.shape[0] for n, t in converted.items() if n.endswith("down.weight")}
    for down, rank in ranks.items():
        converted[down] = converted[down] * (alphas[down.split(".lora.")[0] + ".alpha"] / rank)
    return dict(converted)


def spelled(name: str) -> str:
    """A module's name in diffusers' present spelling."""
    name = name.replace(".processor.", ".").removesuffix(".lora")
    return name + ".0" if name.endswith(".to_out") else name


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("Flux", "kohya"), ("Flux", "comfy"), ("Wan", "comfy"), ("Qwen-Image", "kohya"), ("Qwen-Image", "comfy"),
     ("SDXL", "kohya"), ("Stable Diffusion 1", "kohya")],
)  # fmt: skip
def test_diffusers_reads_what_is_written_as_we_do(kind: str, layout: str) -> None:
    """diffusers' converters of LoRA on the written file give the deltas of ours, by the same names."""
    file = convert_lora(original(kind, "comfy"), layout)
    if kind == "Flux":  # whose converter leaves these without their component
        file = {n: t for n, t in file.items() if "final_layer" not in n}
    if kind == "Wan":  # whose converter drops their alpha
        file = {n: t for n, t in file.items() if not any(x in n for x in ("time_proj", "text_emb", "head"))}
    found = {spelled(n): v for n, v in products(of_diffusers(kind, file)).items()}
    expected = products(convert_lora(file, "diffusers"))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_sd3_is_as_diffusers_converts_checkpoints() -> None:
    """diffusers has no converter of SD3's LoRA, but one of its checkpoints, which is linear in the weights."""
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers as convert

    wanted = products(original("Stable Diffusion 3", "comfy"))
    width, standins = WIDTH["Stable Diffusion 3"], {}
    for n in range(24):
        for side in ("x_block", "context_block"):
            standins |= {f"joint_blocks.{n}.{side}.{x}.weight": torch.zeros(3 * width if "qkv" in x else width)
                         for x in ("attn.qkv", "attn.proj", "adaLN_modulation.1", "mlp.fc1", "mlp.fc2")}  # fmt: skip
    found = products(convert_lora(original("Stable Diffusion 3", "comfy"), "diffusers"))
    for name in ("t_embedder.mlp.0", "t_embedder.mlp.2", "y_embedder.mlp.0", "y_embedder.mlp.2", "context_embedder",
                 "final_layer.linear", "final_layer.adaLN_modulation.1", "x_embedder.proj"):  # fmt: skip
        standins[f"{name}.weight"] = torch.zeros(2 * width)
    standins |= {n.replace(".weight", ".bias"): t for n, t in standins.items()}
    standins |= {"pos_embed": torch.zeros(1)}
    standins |= {f"{n.removeprefix('diffusion_model.')}.weight": t for n, t in wanted.items()}
    qkv = "joint_blocks.23.x_block.attn2"
    standins |= {
        f"{qkv}.qkv.bias": torch.zeros(3 * width),
        f"{qkv}.proj.weight": torch.zeros(1),
        f"{qkv}.proj.bias": torch.zeros(1),
    }
    expected = {
        f"transformer.{n.removesuffix('.weight')}": t for n, t in convert(standins).items() if n.endswith("weight")
    }
    torch.testing.assert_close(found, {n: expected[n] for n in found}, rtol=1e-12, atol=1e-12)


def separate(kind: str, names: Iterable[str], scale: Mapping[str, float] | None = None, *, dtype: torch.dtype) -> Any:
    rng, width = torch.Generator().manual_seed(3), WIDTH.get(kind, 8)
    out = {}
    for i, name in enumerate(names):
        a = torch.randn(2 + i, width, generator=rng).to(dtype)
        b = torch.randn(width, 2 + i, generator=rng).to(dtype)
        flat = f"lora_transformer_{name.replace('.', '_')}"
        out |= {f"{flat}.lora_down.weight": a, f"{flat}.lora_up.weight": b}
        out[f"{flat}.alpha"] = torch.tensor((scale or {}).get(name, 1.0) * (2 + i))
    return out


def test_a_part_of_a_packed_layer_has_zeros_for_the_others() -> None:
    """Also with scales that differ, which half precision rounds: then in float32."""
    q, v = (f"transformer_blocks.0.attn.to_{x}" for x in "qv")
    block = "single_transformer_blocks.0.norm.linear"
    for scale, dtype in (({}, torch.float16), ({q: 0.5, v: 0.5}, torch.float16), ({q: 1.0, v: 0.3}, torch.float32)):
        file = separate("Flux", [q, v, block], scale, dtype=torch.float16)
        comfy = convert_lora(file, "comfy")
        name = "diffusion_model.double_blocks.0.img_attn.qkv"
        assert comfy[f"{name}.lora_up.weight"].dtype == dtype
        assert comfy[f"{name}.lora_down.weight"].shape == (5, 3072)
        found, of = products(comfy)[name], products(file)
        parts = [
            of[f"lora_transformer_{q.replace('.', '_')}"],
            torch.zeros(3072),
            of[f"lora_transformer_{v.replace('.', '_')}"],
        ]
        torch.testing.assert_close(found, torch.cat(parts).double(), rtol=F32_ELEMENTWISE, atol=F32_PRODUCT)
        assert [n for n in convert_lora(comfy, "diffusers") if "to_k" in n] == []


def test_one_a_of_all_parts_is_stored_once() -> None:
    file = original("Flux", "comfy", alpha=None)
    apart = convert_lora(file, "diffusers")
    again = convert_lora(apart, "comfy")
    name = "diffusion_model.single_blocks.37.linear1"
    assert again[f"{name}.lora_down.weight"].shape == file[f"{name}.lora_down.weight"].shape
    assert torch.equal(again[f"{name}.lora_up.weight"], file[f"{name}.lora_up.weight"])


CLIP, BLOCK = "text_model.encoder.layers.3", "encoder.block.23.layer"
TEXTS = [
    ("SDXL", "lora_te1_", "text_encoder.", "clip_l", f"{CLIP}.mlp.fc1"),
    ("SDXL", "lora_te2_", "text_encoder_2.", "clip_g", f"{CLIP}.self_attn.q_proj"),
    ("Flux", "lora_te1_", "text_encoder.", "clip_l", f"{CLIP}.self_attn.out_proj"),
    ("Flux", "lora_te3_", "text_encoder_2.", "t5xxl", f"{BLOCK}.0.SelfAttention.q"),
    ("Stable Diffusion 3", "lora_te2_", "text_encoder_2.", "clip_g", f"{CLIP}.mlp.fc2"),
    ("Stable Diffusion 3", "lora_te3_", "text_encoder_3.", "t5xxl", f"{BLOCK}.1.DenseReluDense.wi_0"),
    ("Stable Diffusion 1", "lora_te_", "text_encoder.", "clip_l", f"{CLIP}.mlp.fc1"),
]


@pytest.mark.parametrize(("kind", "kohya", "diffusers", "comfy", "path"), TEXTS)
def test_text_encoders_have_the_names_of_each_tool(
    kind: str, kohya: str, diffusers: str, comfy: str, path: str
) -> None:
    file = convert_lora(original(kind, "comfy"), "kohya")
    flat = kohya + path.replace(".", "_")
    file |= {f"{flat}.lora_down.weight": torch.ones(1, 8), f"{flat}.lora_up.weight": torch.ones(4, 1)}
    file[f"{flat}.alpha"] = torch.tensor(1.0)
    names = {"kohya": flat, "diffusers": diffusers + path, "comfy": f"text_encoders.{comfy}.transformer.{path}"}
    for layout, name in names.items():
        found = products(convert_lora(convert_lora(file, "comfy"), layout))
        assert [n for n in found if n.startswith(("text_", "lora_te"))] == [name]


def test_what_has_no_name_is_refused() -> None:
    both = separate("Flux", ["transformer_blocks.0.attn.to_q"], dtype=torch.float32)
    both = {n: t[:64] if "up" in n else t[:, :64] if "down" in n else t for n, t in both.items()}
    with pytest.raises(CheckpointError, match="may be of Flux or Stable Diffusion 3 or Qwen-Image"):
        convert_lora(both, "comfy")
    found = convert_lora(both, "comfy", {"modelspec.architecture": "stable-diffusion-3-medium/lora"})
    assert "diffusion_model.joint_blocks.0.x_block.attn.qkv.alpha" in found
    gated = {"diffusion_model.double_blocks.0.img_mlp.0.lora_down.weight": torch.ones(1, 8),
             "diffusion_model.double_blocks.0.img_mlp.0.lora_up.weight": torch.ones(48, 1)}  # fmt: skip
    with pytest.raises(CheckpointError, match="of the model 'flux2'"):
        convert_lora(gated, "diffusers")
    low = {f"transformer_2.blocks.0.attn1.to_q.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    with pytest.raises(CheckpointError, match="have no name in the layout 'comfy'"):
        convert_lora(low, "comfy")
