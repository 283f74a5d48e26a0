r"""Parse names in LoRA files without a config: kohya's, ComfyUI's, diffusers' old and new ones, and other families.

| layout | module | A, B, scale |
|---|---|---|
| kohya | dots written as underscores, after `lora_unet_`, `lora_te_`, `lora_te1_`, ... | `.lora_down.weight`, `.lora_up.weight`, `.alpha` |
| comfy | dotted, after `diffusion_model.`, `text_encoders.clip_l.transformer.`, ... | as kohya's or diffusers' |
| diffusers | dotted, after `unet.`, `text_encoder.`, `transformer.`, ... | `.lora_A.weight`, `.lora_B.weight`, maybe `.alpha` |
| diffusers until 0.20 | as above, with `.processor.to_q_lora` or `.lora_linear_layer` | `.down.weight`, `.up.weight` |

To convert kohya's names, dots must be restored, from a base or from the names of a known architecture
(`architectures`); any other name is an error.

Sources: kohya-ss/sd-scripts, `networks/lora.py`; diffusers, `loaders/lora_conversion_utils.py`.
"""  # noqa: E501 - a table

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from actmat.checkpoints.base import TensorSpec
from actmat.experts.lora.config import AdapterConfig
from actmat.experts.lora.modules import AdapterModule
from actmat.experts.lora.names import unwrapped
from actmat.extras.diffusion.architectures import unet_paths

Side = Literal["A", "B", "alpha"]
_WEIGHT = ".weight"

KOHYA_PREFIXES = {
    "lora_unet__": "unet",
    "lora_unet_": "unet",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te3_": "text_encoder_3",
    "lora_te_": "text_encoder",
    "lora_transformer_": "transformer",
    "lycoris_": "",
}
"""Prefix of kohya's module names -> pipeline component; LyCORIS's wrapper names none."""

COMPONENTS = ("unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3", "prior")
"""Pipeline components that diffusers puts before module names."""

_PREFIXES = {
    "unet": ("unet.", "model.diffusion_model."),
    "text_encoder": ("text_encoder.", "conditioner.embedders.0.", "text_encoders.clip_l."),
    "text_encoder_2": ("text_encoder_2.", "conditioner.embedders.1.", "text_encoders.clip_g."),
}
"""Component that others may equal in names -> prefix of its tensors in a pipeline, in LDM's files and in ComfyUI's."""

_COMFY = re.compile(r"(?P<part>diffusion_model|text_encoders\.\w+\.transformer)\.")
"""Checkpoint parts that ComfyUI puts before the original code's module names."""

_SIDES: dict[str, Side] = {"down": "A", "up": "B", "A": "A", "B": "B"}
_FACTORS = [
    re.compile(r"(?P<module>.+)\.lora_(?P<side>down|up)(?:\.weight)?"),
    re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?"),
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
    """A parsed tensor name: `part` is a pipeline component (may be empty), `path` the module inside it."""

    module: str  # module name in the file, in diffusers' current spelling
    part: str
    path: str
    side: Side
    is_flat: bool  # dots are written as underscores
    is_comfy: bool = False


def parse_factor(name: str) -> FactorName | None:
    """Parse the name of a factor or a scale; None for any other tensor.

    >>> parse_factor("lora_unet_mid_block_proj_in.lora_down.weight").path
    'mid_block_proj_in'
    >>> parse_factor("unet.mid_block.attn1.processor.to_out_lora.up.weight").module
    'unet.mid_block.attn1.to_out.0'
    """
    bare = unwrapped(name)
    match = next((m for p in _FACTORS if (m := p.fullmatch(bare)) is not None), None)
    side: Side = "alpha"
    if match is not None:
        side = _SIDES[match["side"]]
    elif (match := _ALPHA.fullmatch(bare)) is None:
        return None
    module = match["module"]
    for prefix, part in KOHYA_PREFIXES.items():
        if module.startswith(prefix) and "." not in module:
            path = module[len(prefix) :]
            # OneTrainer numbers it 2 in Flux
            is_t5 = prefix.startswith("lora_te") and path.startswith("encoder_block_")
            return FactorName(module, KOHYA_PREFIXES["lora_te3_"] if is_t5 else part, path, side, True)
    if (comfy := _COMFY.match(module)) is not None:
        return FactorName(module, comfy["part"], module[comfy.end() :], side, False, True)
    leaf = match.groupdict().get("leaf")
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
    """Family other than LoRA that the tensor name belongs to; may be empty.

    >>> foreign_factor("lora_unet_mid_block.hada_w1_a"), foreign_factor("model.norm.weight")
    ('LoHa (LyCORIS)', '')
    """
    if _FOREIGN_NAME.search(name) is None:
        return ""
    tail = next(word for word in _FOREIGN if f".{word}" in name)
    return _FOREIGN[tail]


def find_modules(
    specs: Mapping[str, TensorSpec], modules: Sequence[AdapterModule]
) -> tuple[dict[str, list[str]], list[str]]:
    """Flat module name -> base tensors that it may change; and problems."""
    places, problems = find_flat_names(specs, [m.inside for m in modules], modules[0].part if modules else "")
    return {m.name: [places[m.inside]] if m.inside in places else [] for m in modules}, problems


def find_flat_names(
    specs: Mapping[str, TensorSpec], flat: Sequence[str], part: str = ""
) -> tuple[dict[str, str], list[str]]:
    """Base tensor of each flat name, and problems; of the component `part` only, if the base has it with others.

    `down_blocks_0_attentions_0_proj_in` can be `down_blocks.0.attentions.0.proj_in` or `down.blocks_0...`: only the
    base resolves this. Its tensors may have an additional prefix (`model.diffusion_model.`), the same for all modules.

    >>> specs = {n: TensorSpec(n, (2, 2), "float32", "") for n in ("unet.mid_block.proj_in.weight", "x.weight")}
    >>> find_flat_names(specs, ["mid_block_proj_in"])
    ({'mid_block_proj_in': 'unet.mid_block.proj_in.weight'}, [])
    """
    wanted, prefixes = set(flat), _PREFIXES.get(part, ())
    if prefixes and any(name.startswith(prefixes) for name in specs):
        specs = {name: spec for name, spec in specs.items() if name.startswith(prefixes)}
    is_usual = not any(int(m[1]) % 3 for n in specs if (m := _DOWNSAMPLER.search(n)) is not None)
    by_prefix: dict[str, dict[str, list[str]]] = {}
    for name, spec in specs.items():
        if len(spec.shape) < 2:
            continue
        for spelled, target in _spellings(name, unet_paths() if is_usual else {}).items():
            for prefix, rest in _splits(spelled):
                if (found := rest.replace(".", "_")) in wanted:
                    by_prefix.setdefault(prefix, {}).setdefault(found, []).append(target)
    if not by_prefix:
        return {}, []
    counts = Counter({prefix: len(found) for prefix, found in by_prefix.items()})
    (best, most), *others = counts.most_common()
    tied = [p for p, n in others if n == most]
    if tied:
        shown = " and ".join(f"'{p}'" for p in sorted([best, *tied]))
        return {}, [
            f"{most} of its {len(wanted)} modules are in the base under each of the prefixes {shown}, so the "
            "target is ambiguous. Fix: pass one of these models separately as the base"
        ]
    problems = [
        f"module '{found}' is ambiguous: {', '.join(names)} of the base differ only in dots and underscores"
        for found, names in by_prefix[best].items()
        if len(names) > 1
    ]
    return {found: names[0] for found, names in by_prefix[best].items() if len(names) == 1}, problems


_OPEN_CLIP = re.compile(
    r"(?P<before>.*)transformer\.resblocks\.(?P<n>\d+)\.(?P<leaf>attn|mlp)\.(?P<name>\w+)(\.weight)?"
)
_BARE_CLIP = re.compile(r"(text_encoder(?:_\d)?\.|)(?=encoder\.layers\.)")
"""Beginning of names that transformers 5 saves without `text_model`."""
_OF_OPEN_CLIP = {"out_proj": "self_attn.out_proj", "c_fc": "mlp.fc1", "c_proj": "mlp.fc2"}


_DOWNSAMPLER = re.compile(r"input_blocks\.(\d+)\.0\.op\.weight$")
"""Its number is a multiple of 3 in the UNets of `architectures`, which have two layers per block."""


def _spellings(name: str, paths: Mapping[str, str]) -> dict[str, str]:
    """Names of the module of a weight, its own and those of diffusers and transformers -> its tensor.

    A tensor that packs the rows of several stands by the names that it would have in parts, as `apart` reads them.

    >>> list(_spellings("model.diffusion_model.middle_block.1.proj_in.weight", unet_paths()))
    ['model.diffusion_model.middle_block.1.proj_in', 'model.diffusion_model.mid_block.attentions.0.proj_in']
    """
    module = name.removesuffix(_WEIGHT)
    out = {module: name} if module != name else {}
    out |= {prefix + paths[rest]: name for prefix, rest in _splits(module) if rest in paths}
    if (bare := _BARE_CLIP.match(module)) is not None:
        out[f"{bare[1]}text_model.{module[bare.end() :]}"] = name
    if (open_clip := _OPEN_CLIP.fullmatch(name)) is not None:
        layer = f"{open_clip['before']}text_model.encoder.layers.{open_clip['n']}"
        if open_clip["name"] == "in_proj_weight":
            block = name.removesuffix("in_proj_weight")
            out |= {f"{layer}.self_attn.{x}_proj": f"{block}{x}_proj.weight" for x in "qkv"}
        elif leaf := _OF_OPEN_CLIP.get(open_clip["name"]):
            out[f"{layer}.{leaf}"] = name
    return out


def _splits(module: str) -> Iterable[tuple[str, str]]:
    """Yield all splits of a dotted name into prefix and rest."""
    yield "", module
    for i, c in enumerate(module):
        if c == ".":
            yield module[: i + 1], module[i + 1 :]


_CLASSES = {
    "UNet2DConditionModel": "unet",
    "CLIPTextModel": "text_encoder",
    "CLIPTextModelWithProjection": "text_encoder_2",
    "T5EncoderModel": "text_encoder_3",
}


def component_of(fields: Mapping[str, Any]) -> str:
    """Pipeline component of a PEFT adapter, from its config; may be empty.

    >>> component_of({"auto_mapping": {"base_model_class": "UNet2DConditionModel"}})
    'unet'
    """
    name = AdapterConfig(1, 1.0, fields=fields).trained_class
    return _CLASSES.get(name, "transformer" if name.endswith(("Transformer2DModel", "Transformer3DModel")) else "")
