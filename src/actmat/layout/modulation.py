"""Modulation layers of diffusion transformers: one linear layer gives shifts, scales and gates, one map each.

`AdaLayerNormZero` of diffusers (`norm1.linear`), `adaLN_modulation` of DiT, SD3 and Lumina, `img_mod.lin` of Flux's own
layout, `double_stream_modulation_img.linear` of Flux 2, `proj_out_1` of DiT in diffusers: all take the conditioning
vector and cut their rows into equal parts, in the order of the rows.
Sources: W. Peebles, S. Xie, "Scalable Diffusion Models with Transformers", ICCV 2023; diffusers, `normalization.py`.
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
