"""Inputs with which a tiny model can be run, guessed from the signature of its forward pass and from its config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.families.tiny import VOCABULARY

Batch = dict[str, Any]
LENGTH = 7


def batch_of(model: Any) -> tuple[Batch | None, str]:
    """The first guess that the model takes, or None and the last error."""
    why = "no guess of its inputs"
    for batch in _guesses(model):
        try:
            torch.manual_seed(0)
            with torch.no_grad():
                model(**batch)
            return batch, ""
        except Exception as error:  # noqa: BLE001 - a wrong guess fails in any way
            why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:140]
    return None, why


def _guesses(model: Any) -> Iterator[Batch]:
    names = list(inspect.signature(model.forward).parameters)
    if type(model).__module__.startswith("diffusers"):
        yield from _diffusion(model, names)
        return
    config = model.config
    tokens = torch.randint(3, VOCABULARY - 2, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    towers = [
        c for n in ("vision_config", "audio_config", "encoder", "backbone_config") if (c := getattr(config, n, None))
    ]
    text: Batch = {"input_ids": tokens} if "input_ids" in names else {}
    if "decoder_input_ids" in names:
        text["decoder_input_ids"] = tokens[:, :4]
    pixels = [{"pixel_values": p} for p in _pixels([config, *towers])] if "pixel_values" in names else []
    sounds = list(_sounds(config, towers, names))
    if text:
        yield text
    for other in [*pixels, *sounds]:
        yield other
        yield other | text
        yield other | {k: v for k, v in text.items() if k == "decoder_input_ids"}
    if "pixel_values_videos" in names or "pixel_values" in names:
        size = _size(config)
        frames = getattr(config, "num_frames", 4)
        for key in ("pixel_values_videos", "pixel_values"):
            if key in names:
                yield {key: torch.randn(1, frames, 3, size, size)}
    if "bbox" in names and text:
        boxes = torch.randint(0, 50, (2, LENGTH, 4)).sort(-1).values
        yield text | {"bbox": boxes}
        for p in pixels:
            yield text | {"bbox": boxes} | p


def _size(config: Any) -> int:
    size = getattr(config, "image_size", None) or getattr(config, "img_size", None) or 32
    return int(size[0] if isinstance(size, list | tuple) else size)


def _pixels(configs: list[Any]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(2)
    for config in configs:
        for size in dict.fromkeys((_size(config), 64, 224)):
            channels = getattr(config, "num_channels", None)
            for count in dict.fromkeys((channels if isinstance(channels, int) else 3, 3)):
                yield torch.randn(2, count, size, size, generator=generator)


def _sounds(config: Any, towers: list[Any], names: list[str]) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(3)
    mels = next((m for c in (config, *towers) if (m := getattr(c, "num_mel_bins", None))), 16)
    longest = next((m for c in (config, *towers) if (m := getattr(c, "max_source_positions", None))), 64)
    for key in ("input_features", "input_values"):
        if key in names:
            yield {key: torch.randn(1, mels, 2 * longest, generator=generator)}
            yield {key: torch.randn(1, 2 * longest, mels, generator=generator)}
            yield {key: torch.randn(1, 4000, generator=generator)}
            yield {key: torch.randn(1, 1, 4000, generator=generator)}


def _diffusion(model: Any, names: list[str]) -> Iterator[Batch]:
    """Latents, a time, texts and whatever else a diffusion model of diffusers asks for."""
    get = lambda *keys: next((v for k in keys if (v := getattr(model.config, k, None)) is not None), None)  # noqa: E731
    channels, size = get("in_channels", "audio_channels") or 4, get("sample_size") or 8
    channels = channels[0] if isinstance(channels, list | tuple) else channels
    size = size[0] if isinstance(size, list | tuple) else size
    wide = get("cross_attention_dim", "joint_attention_dim", "text_dim", "caption_channels", "text_embed_dim",
               "context_in_dim", "cap_feat_dim", "encoder_hid_dim") or 32  # fmt: skip
    wide = wide[0] if isinstance(wide, list | tuple) else wide
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    times = torch.tensor([3])
    first = "sample" if "sample" in names else "hidden_states" if "hidden_states" in names else "x"
    common: Batch = {}
    for name, value in (
        ("timestep", times), ("timesteps", times), ("encoder_hidden_states", draw(1, LENGTH, wide)),
        ("pooled_projections", draw(1, get("pooled_projection_dim") or 32)), ("img_ids", torch.zeros(16, 3)),
        ("txt_ids", torch.zeros(LENGTH, 3)), ("guidance", torch.tensor([1.0])), ("class_labels", torch.tensor([1])),
        ("encoder_attention_mask", torch.ones(1, LENGTH)), ("encoder_hidden_states_mask", torch.ones(1, LENGTH)),
        ("img_shapes", [(1, 4, 4)]), ("txt_seq_lens", [LENGTH]),
        ("controlnet_cond", draw(1, 3, 8 * size, 8 * size)), ("proj_embedding", draw(1, wide)),
        ("original_size", torch.tensor([[8.0, 8.0]])), ("target_size", torch.tensor([[8.0, 8.0]])),
        ("crop_coords", torch.zeros(1, 2)),
    ):  # fmt: skip
        if name in names:
            common[name] = value
    shapes = [(1, channels, size, size), (1, channels, 4, size, size), (1, 16, channels), (1, channels, 64, 64),
              (1, 1, channels, size, size), (1, 5, channels, size, size), (1, channels, 4096),
              (1, channels, 9, 32, 32)]  # fmt: skip
    optional = [n for n in ("class_labels", "encoder_attention_mask", "guidance") if n in common]
    for shape in shapes:
        sample = draw(*shape)
        yield {first: sample, **common}
        if optional:
            yield {first: sample, **{k: v for k, v in common.items() if k not in optional}}
