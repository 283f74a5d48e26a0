"""Weights of blocks, as SuperMerger (MBW) and LoRA Block Weight (LBW) name and list them, as entries of a recipe.

| models | blocks |
|---|---|
| Stable Diffusion 1, 2 | `BASE` (text encoders, VAE), `IN00` to `IN11`, `M00`, `OUT00` to `OUT11` |
| SDXL | `BASE`, `IN00` to `IN08`, `M00`, `OUT00` to `OUT08` |
| Flux | `CLIP`, `T5`, `VAE`, `IN`, `D00` to `D18`, `S00` to `S37`, `OUT` |
| SD3, Wan, Qwen-Image, Z-Image | `BASE`, `IN`, `L00`, `L01`, ..., `OUT` |

`IN00`, or `IN`, has what comes before the blocks (embeddings of time and size), the last `OUT` what comes after them.
In a list of 12, 17, 20, 26 or 61 values, blocks without a value have 0; a note names blocks that the model lacks.

Sources: hako-mikan/sd-webui-supermerger, `scripts/mergers/mergers.py`; hako-mikan/sd-webui-lora-block-weight,
`scripts/lora_block_weight.py`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from actmat.errors import RecipeError
from actmat.experts.locate import locate, stored_of
from actmat.layout.patterns import compile_pattern
from actmat.recipe import Recipe, make_recipe
from actmat.run.locate import Held

BlockKey = tuple[str, int]
"""Kind and number of a block; the number of one that is alone is 0."""
Counts = Mapping[str, int]
"""Kind -> number of its blocks, in order."""

_LISTS = {
    12: "BASE IN04-05 IN07-08 M00 OUT00-05",
    17: "BASE IN01-02 IN04-05 IN07-08 M00 OUT03-11",
    20: "BASE IN00-08 M00 OUT00-08",
    26: "BASE IN00-11 M00 OUT00-11",
    61: "CLIP T5 IN D00-18 S00-37 OUT",
}
"""Number of values in a list -> their blocks."""
_NAME = re.compile(r"(?P<kind>T5|[A-Z]+)(?P<first>\d{0,3})(?:-(?P=kind)?(?P<last>\d{1,3}))?")
_MOST = 100
"""Layers of a transformer: more than any of these models has."""
REST: BlockKey = ("IN", 0)
"""The block of all tensors that no other block has."""

_SD: Counts = {"BASE": 1, "IN": 12, "M": 1, "OUT": 12}
_XL: Counts = {"BASE": 1, "IN": 9, "M": 1, "OUT": 9}
_FLUX: Counts = {"CLIP": 1, "T5": 1, "VAE": 1, "IN": 1, "D": 19, "S": 38, "OUT": 1}
_STACK: Counts = {"BASE": 1, "IN": 1, "L": _MOST, "OUT": 1}

_MODEL = (
    "{,model.diffusion_model.,diffusion_model.,unet.,transformer.,transformer_2.,lora_unet_,lora_unet__,"
    "lora_transformer_,lycoris_,base_model.model.}"
)
"""Glob of the beginning of names in the model that denoises; those of text encoders and VAE have others."""
_MARKS = (
    ("{input,output}_blocks[._]{9,10,11}[._]*", _SD),
    ("{up,down}_blocks[._]3[._]*", _SD),
    ("{input,output,up,down}_blocks[._]*", _XL),
    ("{middle,mid}_block[._]*", _XL),
    ("{double,single}_blocks[._]*", _FLUX),
    ("single_transformer_blocks[._]*", _FLUX),
    ("{joint_blocks,transformer_blocks,blocks,layers}[._]*", _STACK),
)
"""Glob of names that only models of one form have -> their blocks; the first that matches a name counts."""
_GLOBS = {
    "BASE": "{text_encoder,text_model,lora_te,cond_stage_model.,conditioner.,first_stage_model.,vae.}*",
    "CLIP": "{text_encoders.clip_l.,text_encoder.,lora_te_,lora_te1_}*",
    "T5": "{text_encoders.t5xxl.,text_encoder_2.,lora_te2_,lora_te3_}*",
    "VAE": "{first_stage_model.,vae.}*",
    "M": f"{_MODEL}{{middle,mid}}_block[._]*",
    "OUT": f"{_MODEL}{{final_layer,all_final_layer,norm_out,proj_out,head}}[._]*",
}
_STACKS = {
    "D": "{double_blocks,transformer_blocks}",
    "S": "{single_blocks,single_transformer_blocks}",
    "L": "{joint_blocks,transformer_blocks,blocks,layers}",
}
_LAYERS = ("{resnets,attentions}[._]0", "{resnets,attentions}[._]1")
_DOWN = (*_LAYERS, "downsamplers[._]0")
_UP = (*_LAYERS, "{resnets[._]2,attentions[._]2,upsamplers[._]0}")


def _glob(kind: str, numbers: Sequence[int], count: int) -> str:
    """Glob of the tensors in some of the `count` blocks of a kind, in all layouts."""
    listed = f"[._]{{{','.join(map(str, numbers))}}}[._]"
    if kind in _STACKS:
        return f"{_MODEL}{_STACKS[kind]}{listed}*"
    if count == 1:
        return _GLOBS[kind]
    names = [f"{'input' if kind == 'IN' else 'output'}_blocks{listed}"]
    places = [divmod(n - (kind == "IN"), 3) for n in numbers]  # a block of diffusers holds three of these
    for layer, leaf in enumerate(_DOWN if kind == "IN" else _UP):
        if levels := [str(level) for level, place in places if place == layer and level >= 0]:
            names.append(f"{'down' if kind == 'IN' else 'up'}_blocks[._]{{{','.join(levels)}}}[._]{leaf}[._]")
    names += ["{out,conv_norm_out,conv_out}[._]"] if kind == "OUT" and count - 1 in numbers else []
    return f"{_MODEL}{{{','.join(names)}}}*"


def with_blocks(recipe: Recipe, texts: Sequence[str], held: Held = MappingProxyType({})) -> Recipe:
    """The recipe with weights by block: those of each text, in the order of the experts, times the expert's weight.

    Raises:
        MergeError: see `block_weights`; the number of texts is not that of experts, a weight is not one number, or an
            input cannot be opened.
    """
    if len(texts) != len(recipe.experts):
        raise RecipeError(f"Got {len(recipe.experts)} experts and {len(texts)} texts of blocks; give one per expert.")
    experts, notes = [], [*recipe.notes]
    for expert, text in zip(recipe.experts, texts, strict=True):
        if not isinstance(expert.weight, float):
            raise RecipeError(f"blocks are factors of one number; the weight of '{expert.label}' differs by tensor.")
        place = recipe.base or expert.path
        with held[place]() if place in held else locate(place) as opened:
            weight, absent = block_weights(text, stored_of(opened).specs, expert.weight)
        notes += [f"blocks: '{opened.location}' has no tensors in {', '.join(absent)}"] if absent else []
        experts.append({**expert.model_dump(), "weight": weight})
    weighted = make_recipe({"experts": experts}).experts
    return recipe.model_copy(update={"experts": weighted, "notes": tuple(notes)})


def block_weights(text: str, names: Iterable[str], weight: float = 1.0) -> tuple[list[dict[str, Any]], list[str]]:
    """A weight by pattern, as in a recipe, from weights of blocks; and names in the text of blocks without tensors.

    >>> block_weights("OUT=0.5, M00=0", ["single_blocks.0.linear1.weight", "final_layer.linear.weight"], 0.8)
    Traceback (most recent call last):
    actmat.errors.RecipeError: blocks: found 'M00'; this model has CLIP, T5, VAE, IN, D00-18, S00-37, OUT
    >>> block_weights("M00=0", ["unet.mid_block.attentions.0.proj_in.weight"])[0][1]
    {'value': 1.0}

    Args:
        text: a list of 12, 17, 20, 26 or 61 numbers, or `IN00-05=0.2, M00=0.5, OUT=0.8`; `DEFAULT=0` is for the blocks
            without a value, else 1. `MID` is `M00`.
        names: those of the model's tensors, or of the adapter's.
        weight: factor of all.

    Raises:
        RecipeError: the text is neither, the model has no such blocks, or none at all.
    """
    listed = list(names)
    counts = next((c for mark, c in _MARKS if _has(listed, _MODEL + mark)), None)
    if counts is None:
        raise RecipeError(
            "blocks: expected a model with blocks (UNets of Stable Diffusion, Flux, SD3, Wan, Qwen-Image, Z-Image); "
            f"found names such as '{next(iter(listed), '')[:100]}'"
        )
    values, named = _read(text, counts)
    present = {(k, n) for k, n in values if (k, n) == REST or _has(listed, _glob(k, [n], counts[k]))}
    rest = values[REST]
    groups: dict[float, dict[str, list[int]]] = {}
    for kind, number in sorted(present):
        if (value := values[kind, number]) != rest:
            groups.setdefault(value, {}).setdefault(kind, []).append(number)
    entries = [
        {"match": [_glob(kind, numbers, counts[kind]) for kind, numbers in kinds.items()], "value": value * weight}
        for value, kinds in groups.items()
    ]
    return [*entries, {"value": rest * weight}], [name for name, blocks in named.items() if present.isdisjoint(blocks)]


def _has(names: Sequence[str], glob: str) -> bool:
    return any(map(compile_pattern(glob), names))


def _read(text: str, counts: Counts) -> tuple[dict[BlockKey, float], dict[str, list[BlockKey]]]:
    """The value of each block, and the blocks of each name in the text.

    Raises:
        RecipeError: the text names blocks that the model lacks, or is no list of a known length.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    blocks = [(kind, number) for kind, count in counts.items() for number in range(count)]
    if not any("=" in part for part in parts):
        if len(parts) not in _LISTS:
            raise RecipeError(f"blocks: found {len(parts)} values, expected {', '.join(map(str, _LISTS))}, or IN=0.5")
        positions = [block for name in _LISTS[len(parts)].split() for block in _named(name, {})]
        if not {kind for kind, _ in positions} <= counts.keys():
            raise RecipeError(f"blocks: {len(parts)} values are of {_LISTS[len(parts)]}; {_expected(counts)}")
        values = dict.fromkeys(blocks, 0.0) | dict(zip(positions, map(_number, parts), strict=True))
        lacking = {f"{kind}{number:02}": [(kind, number)] for kind, number in values.keys() - blocks}
        return {block: values[block] for block in blocks}, dict(sorted(lacking.items()))
    rows = {name.strip().upper(): _number(value) for name, _, value in (part.partition("=") for part in parts)}
    values = dict.fromkeys(blocks, rows.pop("DEFAULT", 1.0))
    named = {name: _named(name, counts) for name in rows}
    for name, value in rows.items():
        if not named[name] or not values.keys() >= {*named[name]}:
            raise RecipeError(f"blocks: found '{name[:50]}'; {_expected(counts)}")
        values |= dict.fromkeys(named[name], value)
    return values, named


def _named(name: str, counts: Counts) -> list[BlockKey]:
    """Blocks of a name, a range or a kind; empty for anything else."""
    match = _NAME.fullmatch("M00" if name == "MID" else name)
    if match is None:
        return []
    first, last = match["first"], match["last"]
    numbers = range(int(first), int(last or first) + 1) if first else range(counts.get(match["kind"], 1))
    return [(match["kind"], number) for number in numbers]


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise RecipeError(f"blocks: found '{text.strip()[:50]}', expected a number")


def _expected(counts: Counts) -> str:
    ranges = {kind: f"{kind}00-{count - 1:02}" if count > 1 else kind for kind, count in counts.items()} | {"M": "M00"}
    return f"this model has {', '.join(ranges[kind] for kind in counts)}"
