"""Parts of a checkpoint that holds several models: components of a pipeline, and single files of image and video tools.

A single file has no config; its keys tell what it is. The prefixes are those of the tools' own code (CompVis and
Stability's LDM, Black Forest Labs' Flux, Wan), in which diffusers finds them too (`loaders/single_file_utils.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.model import COMPONENTS

_PARTS = (
    ("model.diffusion_model.", "diffusion model"),
    ("first_stage_model.", "VAE"),
    ("vae.", "VAE"),
    ("cond_stage_model.", "text encoder"),
    ("conditioner.embedders.0.", "first text encoder"),
    ("conditioner.embedders.1.", "second text encoder"),
    ("text_encoders.clip_l.", "text encoder CLIP-L"),
    ("text_encoders.clip_g.", "text encoder CLIP-G"),
    ("text_encoders.t5xxl.", "text encoder T5"),
    ("model_ema.", "moving average of the weights, unchanged by adapters"),
    ("control_model.", "ControlNet"),
)
"""Prefix of names -> part of a single file."""

_DIFFUSION = "model.diffusion_model."
_KINDS = (
    ("conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight", "SDXL"),
    ("conditioner.embedders.0.model.transformer.resblocks.0.attn.in_proj_weight", "SDXL refiner"),
    ("cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight", "Stable Diffusion 2"),
    ("cond_stage_model.transformer.text_model.embeddings.token_embedding.weight", "Stable Diffusion 1"),
    ("*joint_blocks.0.context_block.attn.qkv.weight", "Stable Diffusion 3"),
    ("*double_blocks.0.img_attn.qkv.weight", "Flux"),
    ("*blocks.0.cross_attn.norm_k.weight", "Wan"),
    ("*middle_block.1.transformer_blocks.9.attn1.to_q.weight", "SDXL"),
    ("*input_blocks.0.0.weight", "UNet of latent diffusion"),
    ("encoder.middle.0.residual.0.gamma", "VAE of Wan"),
    ("encoder.mid.block_1.norm1.weight", "VAE of latent diffusion"),
)
"""A name that only this kind of file has (a star: also below the diffusion model's prefix); the first one counts."""


@dataclass(frozen=True, slots=True)
class SingleFile:
    """A checkpoint in the layout of an image or video tool: its kind, and the parts that it has, name -> prefix."""

    kind: str
    parts: Mapping[str, str]

    @property
    def words(self) -> str:
        """One phrase for notes."""
        listed = ", ".join(f"{prefix}* ({part})" for part, prefix in self.parts.items())
        return f"{self.kind} in the layout of its own tool" + (f": {listed}" if listed else "")


def single_file_of(names: Iterable[str]) -> SingleFile | None:
    """The layout of an image or video tool that a checkpoint has, by its names; None for any other.

    >>> single_file_of(["model.diffusion_model.double_blocks.0.img_attn.qkv.weight"]).words
    'Flux in the layout of its own tool: model.diffusion_model.* (diffusion model)'
    """
    known = set(names)
    for mark, kind in _KINDS:
        spelled = (mark[1:], _DIFFUSION + mark[1:]) if mark.startswith("*") else (mark,)
        if any(name in known for name in spelled):
            return SingleFile(kind, {what: p for p, what in _PARTS if any(n.startswith(p) for n in known)})
    return None


def component_configs(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Name of each component of a pipeline -> its config; None for the config of one model."""
    configs = (config or {}).get(COMPONENTS)
    return configs if isinstance(configs, Mapping) and "_class_name" in (config or {}) else None


def parts_of(names: Iterable[str], config: Mapping[str, Any] | None) -> dict[str, str]:
    """Name of each part of a checkpoint -> prefix of its tensors; empty for one model."""
    components = component_configs(config)
    if components is not None:
        return {name: f"{name}." for name in components}
    single = single_file_of(names)
    return {} if single is None else dict(single.parts)
