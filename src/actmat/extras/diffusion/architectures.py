"""Module names of image and video models: diffusers' and those of the original code, which ComfyUI keeps.

A module of the original code corresponds to one module of diffusers, or packs the rows of several (`Parts`). kohya's
names are the original ones with underscores for dots; for Stable Diffusion 1 and 2, diffusers' names.

Sources: comfyanonymous/ComfyUI, `comfy/lora.py`, `comfy/utils.py`; kohya-ss/sd-scripts, `networks`;
huggingface/diffusers, `loaders/lora_conversion_utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

UNET_DEPTH = 12
"""Maximum number of transformer blocks in one attention layer; SDXL has 10."""


@dataclass(frozen=True)
class Parts:
    """Modules of diffusers that form one module of the original code.

    Args:
        paths: module names in row order.
        rows: rows of each, in multiples of the columns; empty: one module with any number of rows.
        is_swapped: whether the two halves of the rows (shift and scale) are exchanged.
    """

    paths: tuple[str, ...]
    rows: tuple[int, ...] = ()
    is_swapped: bool = False


NamedShapes = Iterator[tuple[str, Parts]]


@dataclass(frozen=True)
class Text:
    """One text encoder: its component in diffusers, and the name prefixes of kohya and ComfyUI."""

    component: str
    kohya: str
    comfy: str
    is_t5: bool = False


CLIP_L, CLIP_G, CLIP_H, T5 = (f"text_encoders.{n}.transformer." for n in ("clip_l", "clip_g", "clip_h", "t5xxl"))
COMFY_MODEL = "diffusion_model."


@dataclass(frozen=True)
class ImageArchitecture:
    """One model architecture.

    Args:
        name: name for messages.
        component: component of the denoiser in diffusers.
        listed: function that yields the original name and the parts of every module.
        texts: text encoders.
        words: lower-case words that identify it in metadata.
        widths: input widths of the attention projections (UNets: of the text projections); empty: any.
        kohya_is_diffusers: whether kohya's trainers use diffusers' names.
    """

    name: str
    component: str
    listed: Callable[[], NamedShapes]
    texts: tuple[Text, ...]
    words: tuple[str, ...]
    widths: frozenset[int] = frozenset()
    kohya_is_diffusers: bool = False

    @cached_property
    def originals(self) -> Mapping[str, Parts]:
        """Original name -> its parts."""
        return dict(self.listed())

    @cached_property
    def paths(self) -> Mapping[str, tuple[str, int]]:
        """Name in diffusers -> original name and position among its parts."""
        return {path: (name, i) for name, parts in self.originals.items() for i, path in enumerate(parts.paths)}

    @cached_property
    def flat(self) -> Mapping[str, str]:
        """Original name with underscores -> with dots."""
        return {name.replace(".", "_"): name for name in self.originals}

    @cached_property
    def flat_paths(self) -> Mapping[str, str]:
        """Name in diffusers with underscores -> with dots."""
        return {name.replace(".", "_"): name for name in self.paths}


def text_names(*, is_t5: bool) -> Iterator[str]:
    """Yield the transformers names of a text encoder's linear layers, which all layouts keep.

    >>> next(text_names(is_t5=True))
    'encoder.block.0.layer.0.SelfAttention.q'
    """
    if is_t5:
        for n in range(24):
            yield from (f"encoder.block.{n}.layer.0.SelfAttention.{x}" for x in "qkvo")
            yield from (f"encoder.block.{n}.layer.1.DenseReluDense.{x}" for x in ("wi_0", "wi_1", "wo"))
        return
    for n in range(32):
        layer = f"text_model.encoder.layers.{n}"
        yield from (f"{layer}.self_attn.{x}_proj" for x in ("q", "k", "v", "out"))
        yield from (f"{layer}.mlp.{x}" for x in ("fc1", "fc2"))
    yield "text_projection"


def _alike(names: Mapping[str, str], before: str = "", there: str = "") -> NamedShapes:
    """Yield modules present in both: original name and diffusers' parts, below the two prefixes."""
    return ((before + name, Parts((there + path,))) for name, path in names.items())


_RESNET = {"in_layers.2": "conv1", "out_layers.3": "conv2", "emb_layers.1": "time_emb_proj",
           "skip_connection": "conv_shortcut"}  # fmt: skip
_ATTENTION = {n: n for n in ("proj_in", "proj_out")} | {
    f"transformer_blocks.{n}.{leaf}": f"transformer_blocks.{n}.{leaf}"
    for n in range(UNET_DEPTH)
    for leaf in (
        *(f"attn{i}.to_{x}" for i in (1, 2) for x in ("q", "k", "v", "out.0")), "ff.net.0.proj", "ff.net.2",
    )
}  # fmt: skip


def _unet(blocks: int, attentive: range) -> NamedShapes:
    """Modules of a UNet with two layers per block; `attentive`: up blocks with attention, as their down blocks."""
    yield from _alike({
        "time_embed.0": "time_embedding.linear_1", "time_embed.2": "time_embedding.linear_2",
        "label_emb.0.0": "add_embedding.linear_1", "label_emb.0.2": "add_embedding.linear_2",
        "input_blocks.0.0": "conv_in", "out.2": "conv_out",
    })  # fmt: skip
    for b in range(blocks):
        layers = [(f"input_blocks.{3 * b + j + 1}", f"down_blocks.{b}", j) for j in range(2)]
        layers += [(f"output_blocks.{3 * b + j}", f"up_blocks.{b}", j) for j in range(3)]
        for name, path, j in layers:
            yield from _alike(_RESNET, f"{name}.0.", f"{path}.resnets.{j}.")
            if (b if path.startswith("up") else blocks - 1 - b) in attentive:
                yield from _alike(_ATTENTION, f"{name}.1.", f"{path}.attentions.{j}.")
        if b < blocks - 1:
            place = 2 if b in attentive else 1
            yield f"input_blocks.{3 * b + 3}.0.op", Parts((f"down_blocks.{b}.downsamplers.0.conv",))
            yield f"output_blocks.{3 * b + 2}.{place}.conv", Parts((f"up_blocks.{b}.upsamplers.0.conv",))
    for n, j in ((0, 0), (2, 1)):
        yield from _alike(_RESNET, f"middle_block.{n}.", f"mid_block.resnets.{j}.")
    yield from _alike(_ATTENTION, "middle_block.1.", "mid_block.attentions.0.")


def _sd() -> NamedShapes:
    return _unet(4, range(1, 4))


def _sdxl() -> NamedShapes:
    return _unet(3, range(2))


@cache
def unet_paths() -> Mapping[str, str]:
    """Original name of a module of Stable Diffusion's UNets -> diffusers'; models of all sizes agree."""
    return {name: parts.paths[0] for listed in (_sd, _sdxl) for name, parts in listed()}


_EMBEDDERS = ("timestep_embedder", "text_embedder", "guidance_embedder")


def _flux() -> NamedShapes:
    for name, path in zip(("time_in", "vector_in", "guidance_in"), _EMBEDDERS, strict=True):
        for i, layer in enumerate(("in_layer", "out_layer"), 1):
            yield f"{name}.{layer}", Parts((f"time_text_embed.{path}.linear_{i}",))
    yield from _alike({"img_in": "x_embedder", "txt_in": "context_embedder", "final_layer.linear": "proj_out"})
    yield "final_layer.adaLN_modulation.1", Parts(("norm_out.linear",), is_swapped=True)
    for n in range(19):
        name, path = f"double_blocks.{n}", f"transformer_blocks.{n}"
        sides = (("img", "", ("to_q", "to_k", "to_v"), "to_out.0"),
                 ("txt", "_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out"))  # fmt: skip
        for side, end, inner, outer in sides:
            yield f"{name}.{side}_attn.qkv", Parts(tuple(f"{path}.attn.{x}" for x in inner), (1, 1, 1))
            yield f"{name}.{side}_attn.proj", Parts((f"{path}.attn.{outer}",))
            yield f"{name}.{side}_mod.lin", Parts((f"{path}.norm1{end}.linear",))
            yield f"{name}.{side}_mlp.0", Parts((f"{path}.ff{end}.net.0.proj",), (4,))
            yield f"{name}.{side}_mlp.2", Parts((f"{path}.ff{end}.net.2",))
    for n in range(38):
        name, path = f"single_blocks.{n}", f"single_transformer_blocks.{n}"
        separate = tuple(f"{path}.{x}" for x in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"))
        yield f"{name}.linear1", Parts(separate, (1, 1, 1, 4))
        yield f"{name}.linear2", Parts((f"{path}.proj_out",))
        yield f"{name}.modulation.lin", Parts((f"{path}.norm.linear",))


def _sd3() -> NamedShapes:
    for name, path in zip(("t_embedder", "y_embedder"), _EMBEDDERS, strict=False):
        for i, layer in enumerate((0, 2), 1):
            yield f"{name}.mlp.{layer}", Parts((f"time_text_embed.{path}.linear_{i}",))
    yield from _alike({"context_embedder": "context_embedder", "x_embedder.proj": "pos_embed.proj",
                       "final_layer.linear": "proj_out"})  # fmt: skip
    yield "final_layer.adaLN_modulation.1", Parts(("norm_out.linear",), is_swapped=True)
    for n in range(38):
        name, path = f"joint_blocks.{n}", f"transformer_blocks.{n}"
        packed = (("x_block.attn", "attn", ("to_q", "to_k", "to_v"), "to_out.0"),
                  ("x_block.attn2", "attn2", ("to_q", "to_k", "to_v"), "to_out.0"),
                  ("context_block.attn", "attn", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out"))  # fmt: skip
        for own, there, inner, outer in packed:
            yield f"{name}.{own}.qkv", Parts(tuple(f"{path}.{there}.{x}" for x in inner), (1, 1, 1))
            yield f"{name}.{own}.proj", Parts((f"{path}.{there}.{outer}",))
        for side, end in (("x_block", ""), ("context_block", "_context")):
            yield f"{name}.{side}.mlp.fc1", Parts((f"{path}.ff{end}.net.0.proj",))
            yield f"{name}.{side}.mlp.fc2", Parts((f"{path}.ff{end}.net.2",))
            # the last block has only shift and scale, in reverse order
            modulation = Parts((f"{path}.norm1{end}.linear",), is_swapped=end != "")
            yield f"{name}.{side}.adaLN_modulation.1", modulation


def _wan() -> NamedShapes:
    yield from _alike({
        "patch_embedding": "patch_embedding", "head.head": "proj_out",
        "time_projection.1": "condition_embedder.time_proj",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    })  # fmt: skip
    inner = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "k_img": "add_k_proj", "v_img": "add_v_proj"}
    for n in range(64):
        for name, path in (("self_attn", "attn1"), ("cross_attn", "attn2")):
            yield from _alike(inner, f"blocks.{n}.{name}.", f"blocks.{n}.{path}.")
        yield from _alike({"ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2"}, f"blocks.{n}.", f"blocks.{n}.")


def _qwen_image() -> NamedShapes:
    names = ["img_in", "txt_in", "proj_out", "norm_out.linear"]
    names += [f"time_text_embed.timestep_embedder.linear_{i}" for i in (1, 2)]
    names += [
        f"transformer_blocks.{n}.{leaf}"
        for n in range(60)
        for leaf in (
            *(f"attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")),
            *(f"attn.add_{x}_proj" for x in "qkv"),
            *(f"{side}_{x}" for side in ("img", "txt") for x in ("mod.1", "mlp.net.0.proj", "mlp.net.2")),
        )
    ]
    return _alike({n: n for n in names})


_TE1 = Text("text_encoder", "lora_te1_", CLIP_L)
_TE2 = Text("text_encoder_2", "lora_te2_", CLIP_G)
ARCHITECTURES = (
    ImageArchitecture(
        "Stable Diffusion 1", "unet", _sd, (Text("text_encoder", "lora_te_", CLIP_L),),
        ("sd_v1", "stable-diffusion-v1"), frozenset({768}), kohya_is_diffusers=True,
    ),
    ImageArchitecture(
        "Stable Diffusion 2", "unet", _sd, (Text("text_encoder", "lora_te_", CLIP_H),),
        ("sd_v2", "stable-diffusion-v2"), frozenset({1024}), kohya_is_diffusers=True,
    ),
    ImageArchitecture(
        "SDXL", "unet", _sdxl, (_TE1, _TE2), ("sdxl", "stable-diffusion-xl"), frozenset({2048}),
    ),
    ImageArchitecture(
        "Flux", "transformer", _flux, (_TE1, Text("text_encoder_2", "lora_te3_", T5, is_t5=True)),
        ("flux1", "flux-1", "flux.1", "chroma"), frozenset({3072}),
    ),
    ImageArchitecture(
        "Stable Diffusion 3", "transformer", _sd3, (_TE1, _TE2, Text("text_encoder_3", "lora_te3_", T5, is_t5=True)),
        ("sd3", "stable-diffusion-3"), frozenset({1536, 2432}),
    ),
    ImageArchitecture("Wan", "transformer", _wan, (), ("wan",)),
    ImageArchitecture("Qwen-Image", "transformer", _qwen_image, (), ("qwen",), frozenset({3072})),
)  # fmt: skip
