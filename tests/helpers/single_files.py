"""Tiny models of diffusers, and pipelines of them."""

import json
from pathlib import Path
from typing import Any

import torch
from tests.helpers.diffusion import text_encoder


def second_text_encoder(width: int = 24) -> Any:
    """A CLIP text model with a projection."""
    return text_encoder(3, width, 32, projection_dim=20)


def wan() -> Any:
    """A transformer of Wan 2.1, text to video."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(6)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
        freq_dim=8, ffn_dim=16, num_layers=2,
    ).eval()  # fmt: skip


def save_pipeline(folder: Path, kind: str, parts: dict[str, Any]) -> None:
    """A folder with an index and these components."""
    folder.mkdir()
    libraries = {name: ["diffusers" if "diffusers" in type(m).__module__ else "transformers", type(m).__name__]
                 for name, m in parts.items()}  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps({"_class_name": kind, **libraries}))
    for name, model in parts.items():
        model.save_pretrained(folder / name)
