"""CLIP models as open_clip stores them, turned into a folder that transformers loads.

Two places: a folder (or hub repository) with `open_clip_config.json` and `open_clip_model.safetensors`, which takes no
further package, and `open_clip:NAME:TAG`, a name and a tag of open_clip's own list, which takes that package.

Shapes: `W` width of a tower, `P` width of the joint space.

| open_clip | transformers |
| --- | --- |
| `visual.conv1`, `visual.class_embedding`, `visual.positional_embedding` | `vision_model.embeddings.*` |
| `visual.transformer.resblocks.N.attn.in_proj_*` (q, k, v stacked) | `...layers.N.self_attn.{q,k,v}_proj.*` |
| `visual.proj` (`W P`), `text_projection` (`W P`) | `visual_projection.weight`, `text_projection.weight` (`P W`) |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from actmat.errors import CheckpointError

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
_HEAD_WIDTH = 64
_SIZES = {
    "": {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "init_logit_scale"},
    "vision_cfg.": {"image_size", "layers", "width", "head_width", "mlp_ratio", "patch_size", "patch_dropout"},
    "text_cfg.": {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"},
}
"""Keys that are converted or matter only to training. Any other changes the forward pass: an error unless it is off."""
_USUAL = {"vision_cfg.pool_type": "tok", "text_cfg.pool_type": "argmax", "text_cfg.proj_type": "linear"}
_BLOCK = {
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "attn.out_proj.": "self_attn.out_proj.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
}
_PLAIN = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # the name is spelt so
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "logit_scale": "logit_scale",
}
_TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
_TOWERS = {
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "transformer.resblocks.": "text_model.encoder.layers.",
}


def is_open_clip(folder: Path) -> bool:
    """True if the folder is open_clip's and not (also) a CLIP of transformers."""
    if not (folder / CONFIG).is_file():
        return False
    config = folder / "config.json"
    return not config.is_file() or json.loads(config.read_text(encoding="utf-8")).get("model_type") != "clip"


def read_open_clip(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Sizes and weights of a folder.

    Raises:
        CheckpointError: there are no weights as safetensors; pickles are not opened.
    """
    if not (folder / WEIGHTS).is_file():
        there = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".safetensors"})
        raise CheckpointError(
            f"{folder}: a model of open_clip needs {WEIGHTS}, but the files with weights are: "
            f"{', '.join(there) or 'none'}. Pickles are not opened: take a publication with safetensors, or convert "
            "the file with safetensors.torch.save_file where you trust it."
        )
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return config["model_cfg"], load_file(folder / WEIGHTS)


def from_package(location: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Sizes and weights of `open_clip:NAME:TAG`, downloaded by that package.

    Raises:
        CheckpointError: the package is missing, or the name is not of that form or not known there.
    """
    _, _, rest = location.partition(":")
    name, _, tag = rest.partition(":")
    if not name or not tag:
        raise CheckpointError(
            f"'{location}': expected open_clip:NAME:TAG, such as open_clip:ViT-B-32:laion2b_s34b_b79k."
        )
    try:
        import open_clip
    except ImportError as error:
        raise CheckpointError(
            f"'{location}' is loaded by the package open_clip, which is not installed: pip install open_clip_torch. "
            f"Hub repositories with {WEIGHTS} are read without it: give their id instead."
        ) from error
    sizes = open_clip.get_model_config(name)
    if sizes is None:
        raise CheckpointError(f"'{location}': open_clip knows no model '{name}'; see open_clip.list_pretrained().")
    try:
        model = open_clip.create_model(name, pretrained=tag)
    except RuntimeError as error:
        raise CheckpointError(f"'{location}': {error}") from error
    # OpenAI's weights were trained with the quick GELU, whatever the model's name says; the loaded model knows.
    quick = any(type(module).__name__ == "QuickGELU" for module in model.modules())
    return {**sizes, "quick_gelu": quick}, model.state_dict()


def transformers_config(sizes: Mapping[str, Any]) -> Any:
    """`CLIPConfig` of open_clip's `model_cfg`.

    Raises:
        CheckpointError: the model is no CLIP of two plain transformers.
    """
    from transformers import CLIPConfig

    vision, text = sizes["vision_cfg"], sizes["text_cfg"]
    parts = (("", sizes), ("vision_cfg.", vision), ("text_cfg.", text))
    odd = [
        f"{where}{key}: {value!r}"
        for where, part in parts
        for key, value in part.items()
        if key not in _SIZES[where] and value and value != _USUAL.get(where + key)
    ]
    odd += ["vision_cfg.layers: a ResNet"] if not isinstance(vision["layers"], int) else []
    odd += [
        f"vision_cfg.{k}: {vision[k]!r} is not one number"
        for k in ("image_size", "patch_size")
        if not isinstance(vision[k], int)
    ]
    if odd:
        raise CheckpointError("Only CLIP with two plain transformers can be taken over from open_clip.", odd)
    act = "quick_gelu" if sizes.get("quick_gelu") else "gelu"

    def tower(width: int, layers: int, heads: int, given: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "hidden_size": width,
            "intermediate_size": int(width * given.get("mlp_ratio", 4.0)),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "hidden_act": act,
            "projection_dim": sizes["embed_dim"],
        }

    heads = vision["width"] // vision.get("head_width", _HEAD_WIDTH)
    return CLIPConfig(
        vision_config={
            **tower(vision["width"], vision["layers"], heads, vision),
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
        },
        text_config={
            **tower(text["width"], text["layers"], text["heads"], text),
            "vocab_size": text["vocab_size"],
            "max_position_embeddings": text["context_length"],
            # the feature is taken at the last token of the vocabulary
            "bos_token_id": text["vocab_size"] - 2,
            "eos_token_id": text["vocab_size"] - 1,
            "pad_token_id": text["vocab_size"] - 1,
        },
        projection_dim=sizes["embed_dim"],
    )


def translated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the names and in the orientation of `transformers.CLIPModel`, in float32.

    Raises:
        CheckpointError: there are tensors of which nothing is known.
    """
    found: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu", torch.float32)
        if name in _PLAIN:
            found[_PLAIN[name]] = tensor
        elif name in _TRANSPOSED:
            found[_TRANSPOSED[name]] = tensor.T
        elif not _block(name, tensor, found):
            unknown.append(name)
    if unknown:
        raise CheckpointError("These tensors are not of a CLIP with two plain transformers.", unknown)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def clip_model(sizes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """`transformers.CLIPModel` with open_clip's weights, every one of its own taken from there.

    Raises:
        CheckpointError: the model is another kind, or tensors are missing, too many, or of another shape.
    """
    from transformers import CLIPModel

    found = translated(tensors)
    model = CLIPModel(transformers_config(sizes))
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = [f"{name} {shape} is missing" for name, shape in wanted.items() if name not in found]
    problems += [f"{name} has no place in the model that the configuration describes" for name in found.keys() - wanted]
    problems += [
        f"{name} has the shape {tuple(tensor.shape)}, the configuration wants {wanted[name]}"
        for name, tensor in found.items()
        if name in wanted and tuple(tensor.shape) != wanted[name]
    ]
    if problems:
        raise CheckpointError("Weights and configuration of this open_clip model do not fit together.", problems)
    model.load_state_dict(found)
    return model


def _block(name: str, tensor: Tensor, found: dict[str, Tensor]) -> bool:
    """Put a block's tensor where it belongs; whether it is one."""
    for theirs, ours in _TOWERS.items():
        if not name.startswith(theirs):
            continue
        layer, _, rest = name.removeprefix(theirs).partition(".")
        if rest in ("attn.in_proj_weight", "attn.in_proj_bias"):
            kind = rest.rpartition("_")[2]
            for part, third in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{ours}{layer}.self_attn.{part}_proj.{kind}"] = third
            return True
        for old, new in _BLOCK.items():
            if rest.startswith(old):
                found[f"{ours}{layer}.{new}{rest.removeprefix(old)}"] = tensor
                return True
    return False
