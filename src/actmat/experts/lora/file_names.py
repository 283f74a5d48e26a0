r"""Tensor names of LoRA files without a config: kohya's, diffusers' old and new ones; other families named.

| layout | module | A, B, scale |
|---|---|---|
| kohya | dots written as underscores, after `lora_unet_`, `lora_te_`, `lora_te1_`, ... | `.lora_down.weight`, `.lora_up.weight`, `.alpha` |
| diffusers | dotted, after `unet.`, `text_encoder.`, `transformer.`, ... | `.lora_A.weight`, `.lora_B.weight`, maybe `.alpha` |
| diffusers until 0.20 | as above, with `.processor.to_q_lora` or `.lora_linear_layer` | `.down.weight`, `.up.weight` |

Sources: kohya-ss/sd-scripts, `networks/lora.py`; diffusers, `loaders/lora_conversion_utils.py`.
"""  # noqa: E501 - a table

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["COMPONENTS", "KOHYA_PREFIXES", "FactorName", "foreign_factor", "holds_factors", "parse_factor"]

Side = Literal["A", "B", "alpha"]

KOHYA_PREFIXES = {
    "lora_unet_": "unet",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te3_": "text_encoder_3",
    "lora_te_": "text_encoder",
}
"""Beginning of kohya's module names -> the component of a pipeline."""

COMPONENTS = ("unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3", "prior")
"""Components of a pipeline as diffusers puts them before module names."""

_SIDES: dict[str, Side] = {"down": "A", "up": "B", "A": "A", "B": "B"}
_FACTORS = [
    re.compile(r"(?P<module>.+)\.lora_(?P<side>down|up)\.weight"),
    re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight"),
    re.compile(r"(?P<module>.+)\.processor\.(?P<leaf>to_\w+)_lora\.(?P<side>down|up)\.weight"),
    re.compile(r"(?P<module>.+)\.(?P<leaf>to_\w+)_lora\.(?P<side>down|up)\.weight"),
    re.compile(r"(?P<module>.+)\.(?:lora|lora_linear_layer)\.(?P<side>down|up)\.weight"),
]
_ALPHA = re.compile(r"(?P<module>.+)\.alpha")
_LEAVES = {"to_out": "to_out.0"}
_TEXT_LEAVES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}

_FOREIGN = {
    "hada_": "LoHa (LyCORIS)",
    "lokr_": "LoKr (LyCORIS)",
    "oft_": "OFT",
    "boft_": "BOFT",
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "lora_mid": "LoRA with a third factor for convolutions (LoCon, CP decomposition)",
    "ia3_": "(IA)^3",
    "on_input": "(IA)^3 (LyCORIS)",
    "glora_": "GLoRA",
    "bora_": "BoRA",
}
_FOREIGN_NAME = re.compile(r"\.(?:" + "|".join(map(re.escape, _FOREIGN)) + r")[^.]*(?:\.\w+)?$")


@dataclass(frozen=True, slots=True)
class FactorName:
    """One tensor name, taken apart: `part` is a component of a pipeline, or empty; `path` the module inside of it."""

    module: str  # name of the module in the file; in diffusers' present spelling
    part: str
    path: str
    side: Side
    is_flat: bool  # dots are written as underscores


def parse_factor(name: str) -> FactorName | None:
    """The parts of the name of a factor or of a scale, or None for any other tensor.

    >>> parse_factor("lora_unet_mid_block_proj_in.lora_down.weight").path
    'mid_block_proj_in'
    >>> parse_factor("unet.mid_block.attn1.processor.to_out_lora.up.weight").module
    'unet.mid_block.attn1.to_out.0'
    """
    bare = name.removeprefix("base_model.model.")
    found = next((m for p in _FACTORS if (m := p.fullmatch(bare)) is not None), None)
    side: Side = "alpha"
    if found is not None:
        side = _SIDES[found["side"]]
    elif (found := _ALPHA.fullmatch(bare)) is None:
        return None
    module = found["module"]
    for prefix, part in KOHYA_PREFIXES.items():
        if module.startswith(prefix) and "." not in module:
            return FactorName(module, part, module[len(prefix) :], side, True)
    leaf = found.groupdict().get("leaf")
    if side == "alpha":
        module = module.removesuffix("_lora").removesuffix(".lora_linear_layer").removesuffix(".lora")
        module, _, last = module.replace(".processor.", ".").rpartition(".")
        leaf, module = (last, module) if last.startswith("to_") else (None, f"{module}.{last}" if module else last)
    part = next((c for c in COMPONENTS if module.startswith(c + ".")), "")
    if leaf is not None:
        in_text = part.startswith("text_encoder")
        module = f"{module}.{(_TEXT_LEAVES if in_text else _LEAVES).get(leaf, leaf)}"
    return FactorName(module, part, module[len(part) + 1 :] if part else module, side, False)


def foreign_factor(name: str) -> str:
    """The family, other than LoRA, that a tensor of this name belongs to; empty for any other.

    >>> foreign_factor("lora_unet_mid_block.hada_w1_a"), foreign_factor("model.norm.weight")
    ('LoHa (LyCORIS)', '')
    """
    if _FOREIGN_NAME.search(name) is None:
        return ""
    tail = next(word for word in _FOREIGN if f".{word}" in name)
    return _FOREIGN[tail]


def holds_factors(names: Iterable[str]) -> bool:
    """True if a tensor is a factor of LoRA, or of a family in its place; a scale by itself is none.

    >>> holds_factors(["a.lora_up.weight"]), holds_factors(["a.weight", "block.alpha"])
    (True, False)
    """
    return any(foreign_factor(n) or ((f := parse_factor(n)) is not None and f.side != "alpha") for n in names)
