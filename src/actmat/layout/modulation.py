"""Layers of diffusion transformers that hold several maps, known by name and by the shapes of their own block.

**Modulation**: one linear layer gives shifts, scales and gates, one map each.

`AdaLayerNormZero` of diffusers (`norm1.linear`), `adaLN_modulation` of DiT, SD3 and Lumina, `img_mod.lin` of Flux's own
layout, `double_stream_modulation_img.linear` of Flux 2, `proj_out_1` of DiT in diffusers: all take the conditioning
vector and cut their rows into equal parts, in the order of the rows.
Sources: W. Peebles, S. Xie, "Scalable Diffusion Models with Transformers", ICCV 2023; diffusers, `normalization.py`.

**Parallel branches** of a block:

| layer | rows | source |
|---|---|---|
| `linear1` of Flux's single-stream blocks | q, k, v, feed-forward (of Flux 2: gate, up) | black-forest-labs/flux |
| `to_qkv_mlp_proj` of the same block | the same | diffusers, `transformer_flux2.py` |
| `proj_mlp` of Ovis, twice the inputs of `proj_out` for it | up, gate | diffusers, `transformer_ovis_image.py` |
| `projection_in` of FocalNet | query, context, one gate per focal level | transformers, `modeling_focalnet.py` |

A layer whose shape does not fit is one matrix.
"""

from __future__ import annotations

import re

from actmat.layout.packing import Packing

_MODULATION = re.compile(
    r"(?:.*\.)?(?:norm\w*\.linear(?:_1)?|adaLN_modulation(?:\.\d+)?|adaln_modulation(?:\.\d+)?|\w*_mod(?:\.lin|\.\d+)|"
    r"\w*modulation(?:_\w+)?\.lin(?:ear)?|\w*modulations\.\w+\.lin(?:ear)?|time_modulation\.\d+|proj_out_1)\.weight"
)
_LAST = re.compile(r"(?:.*\.)?(?:norm_out\.linear|final_layer\.adaLN_modulation(?:\.\d+)?)\.weight")
MOST_PARTS = 9
"""Parts of the largest modulation: shift, scale and gate of three branches (SD 3.5 with dual attention)."""


def modulation_packing(name: str, rows: int, cols: int) -> Packing | None:
    """The equal parts of a modulation layer, or None for another layer.

    >>> modulation_packing("blocks.0.norm1.linear.weight", 96, 16).words
    '6 maps of a modulation (shifts, scales, gates)'
    """
    if _MODULATION.fullmatch(name) is None:
        return None
    count, rest = divmod(rows, cols)
    if _LAST.fullmatch(name) and rows % 2 == 0:
        count, rest = 2, 0
    if rest or not 2 <= count <= MOST_PARTS:
        return None
    return Packing(
        tuple((f"part{k}", 1) for k in range(count)), words=f"{count} maps of a modulation (shifts, scales, gates)"
    )


PARTNERS_OF_BRANCHES = {"linear1": ("linear2",), "to_qkv_mlp_proj": ("to_out",), "proj_mlp": ("proj_out",)}
"""Layer -> the layer that reads all its branches: its inputs tell the width of the feed-forward branch."""

_SINGLE_STREAM = re.compile(r"(?:.*\.)?(?:single_blocks\.\d+\.linear1|to_qkv_mlp_proj)\.weight")
_SECOND_BRANCH = re.compile(r"(?:.*\.)?single_transformer_blocks\.\d+\.proj_mlp\.weight")
_FOCAL = re.compile(r"(?:.*\.)?modulation\.(?:projection_in|f)\.weight")
MOST_FOCAL_LEVELS = 8
"""Gates of the largest focal modulation."""


def branch_packing(name: str, rows: int, cols: int, partner: tuple[int, ...] | None) -> Packing | None:
    """The maps of a layer of parallel branches; None for another layer, or if the shapes do not fit.

    `partner` is the stored shape of the layer that reads them (`PARTNERS_OF_BRANCHES`), if there is one.

    >>> branch_packing("single_blocks.0.linear1.weight", 70, 10, (10, 30)).words
    'q, k, v, gate and up of a single-stream block'
    """
    inputs = partner[1] if partner is not None and len(partner) == 2 else None
    if _SINGLE_STREAM.fullmatch(name) and rows > 3 * cols:
        return _single_stream(rows, cols, inputs)
    if _SECOND_BRANCH.fullmatch(name) and inputs is not None and inputs > cols and rows == 2 * (inputs - cols):
        return Packing((("up", 1), ("gate", 1)), words="up, gate of the feed-forward branch (halves)")
    gates = rows - 2 * cols
    if _FOCAL.fullmatch(name) and 2 <= gates <= MOST_FOCAL_LEVELS:
        parts = (("query", cols), ("context", cols), ("gates", gates))
        return Packing(parts, unit=1, words=f"query, context and {gates} gates of a focal modulation")
    return None


def _single_stream(rows: int, cols: int, inputs: int | None) -> Packing:
    """q, k, v and the feed-forward branch, which is gated if it has twice as many rows as are read of it."""
    attention, rest = (("q", cols), ("k", cols), ("v", cols)), rows - 3 * cols
    if inputs is not None and rest == 2 * (inputs - cols):
        halves = (("gate", rest // 2), ("up", rest // 2))
        return Packing((*attention, *halves), unit=1, words="q, k, v, gate and up of a single-stream block")
    return Packing((*attention, ("mlp", rest)), unit=1,
                   words="q, k, v and the feed-forward branch of a single-stream block")  # fmt: skip
