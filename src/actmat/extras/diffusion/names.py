r"""Names in LoRA files without a config: kohya's, ComfyUI's, diffusers' old and new ones; those of other families.

| layout | module | A, B, scale |
|---|---|---|
| kohya | dots written as underscores, after `lora_unet_`, `lora_te_`, `lora_te1_`, ... | `.lora_down.weight`, `.lora_up.weight`, `.alpha` |
| comfy | dotted, after `diffusion_model.`, `text_encoders.clip_l.transformer.`, ... | as kohya's or diffusers' |
| diffusers | dotted, after `unet.`, `text_encoder.`, `transformer.`, ... | `.lora_A.weight`, `.lora_B.weight`, maybe `.alpha` |
| diffusers until 0.20 | as above, with `.processor.to_q_lora` or `.lora_linear_layer` | `.down.weight`, `.up.weight` |

From kohya's names to the others dots must be put back: either a base says where, or the words do that occur in UNets and
CLIP text encoders of diffusers and transformers; another word is an error, never a guess.

Sources: kohya-ss/sd-scripts, `networks/lora.py`; diffusers, `loaders/lora_conversion_utils.py`.
"""  # noqa: E501 - a table

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from actmat.checkpoints.base import TensorSpec
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.modules import AdapterLayout, AdapterModule

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
}
"""Beginning of kohya's module names -> the component of a pipeline."""

COMPONENTS = ("unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3", "prior")
"""Components of a pipeline as diffusers puts them before module names."""

_COMFY = re.compile(r"(?P<part>diffusion_model|text_encoders\.\w+\.transformer)\.")
"""Parts of a checkpoint as ComfyUI puts them before module names, which are those of the original code."""

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
    is_comfy: bool = False


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
    if (comfy := _COMFY.match(module)) is not None:
        return FactorName(module, comfy["part"], module[comfy.end() :], side, False, True)
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


def find_modules(
    specs: Mapping[str, TensorSpec], modules: Sequence[AdapterModule]
) -> tuple[dict[str, list[str]], list[str]]:
    """Tensors of a base that each module with a flat name may change, by its name; and problems."""
    found, problems = find_flat_names(specs, [m.inside for m in modules])
    return {m.name: [found[m.inside]] if m.inside in found else [] for m in modules}, problems


def find_flat_names(specs: Mapping[str, TensorSpec], flat: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Tensor of the base for each flat name that is found, and problems.

    `down_blocks_0_attentions_0_proj_in` may be `down_blocks.0.attentions.0.proj_in` or `down.blocks_0...`: only the
    base says which. Its tensors may have one more prefix (`model.diffusion_model.`), the same for all modules.

    >>> specs = {n: TensorSpec(n, (2, 2), "float32", "") for n in ("unet.mid_block.proj_in.weight", "x.weight")}
    >>> find_flat_names(specs, ["mid_block_proj_in"])
    ({'mid_block_proj_in': 'unet.mid_block.proj_in.weight'}, [])
    """
    wanted = set(flat)
    by_prefix: dict[str, dict[str, list[str]]] = {}
    for name, spec in specs.items():
        if not name.endswith(_WEIGHT) or len(spec.shape) < 2:
            continue
        for prefix, rest in _splits(name.removesuffix(_WEIGHT)):
            if (found := rest.replace(".", "_")) in wanted:
                by_prefix.setdefault(prefix, {}).setdefault(found, []).append(name)
    if not by_prefix:
        return {}, []
    counts = Counter({prefix: len(found) for prefix, found in by_prefix.items()})
    (best, most), *others = counts.most_common()
    tied = [p for p, n in others if n == most]
    if tied:
        shown = " and ".join(f"'{p}'" for p in sorted([best, *tied]))
        return {}, [
            f"{most} of its {len(wanted)} modules are found in the base under each of the prefixes {shown}, and the "
            "file does not say which is meant. Give one of these models by itself as the base"
        ]
    problems = [
        f"module '{found}' may be any of {', '.join(names)} of the base, which differ only in dots and underscores"
        for found, names in by_prefix[best].items()
        if len(names) > 1
    ]
    return {found: names[0] for found, names in by_prefix[best].items() if len(names) == 1}, problems


def _splits(module: str) -> Iterable[tuple[str, str]]:
    """A dotted name as prefix and rest, at every dot."""
    yield "", module
    for i, c in enumerate(module):
        if c == ".":
            yield module[: i + 1], module[i + 1 :]


_JOINED = [
    "down_blocks",
    "up_blocks",
    "mid_block",
    "transformer_blocks",
    "to_q",
    "to_k",
    "to_v",
    "to_out",
    "proj_in",
    "proj_out",
    "conv_in",
    "conv_out",
    "conv_shortcut",
    "time_emb_proj",
    "time_embedding",
    "add_embedding",
    "linear_1",
    "linear_2",
    "text_model",
    "self_attn",
    "q_proj",
    "k_proj",
    "v_proj",
    "out_proj",
    "text_projection",
    "token_embedding",
    "position_embedding",
    "add_k_proj",
    "add_q_proj",
    "add_v_proj",
    "to_add_out",
]
_PLAIN = [
    "attentions",
    "resnets",
    "downsamplers",
    "upsamplers",
    "attn1",
    "attn2",
    "attn",
    "ff",
    "net",
    "proj",
    "conv",
    "conv1",
    "conv2",
    "encoder",
    "layers",
    "mlp",
    "fc1",
    "fc2",
    "embeddings",
]
_WORDS = {*_JOINED, *_PLAIN}
_LONGEST = max(w.count("_") for w in _JOINED) + 1

_KOHYA = {"unet": "lora_unet_", "text_encoder_2": "lora_te2_", "text_encoder_3": "lora_te3_"}
_CLASSES = {
    "UNet2DConditionModel": "unet",
    "CLIPTextModel": "text_encoder",
    "CLIPTextModelWithProjection": "text_encoder_2",
    "T5EncoderModel": "text_encoder_3",
}


def unflatten(flat: str) -> str | None:
    """The dotted name of a module of a UNet or a CLIP text encoder; None with a word that neither has.

    >>> unflatten("mid_block_attentions_0_transformer_blocks_0_attn1_to_out_0")
    'mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0'
    >>> unflatten("input_blocks_4_1_proj_in") is None
    True
    """
    pieces, out, i = flat.split("_"), [], 0
    while i < len(pieces):
        for n in range(_LONGEST, 0, -1):
            word = "_".join(pieces[i : i + n])
            if word in _WORDS or (n == 1 and word.isdigit()):
                out.append(word)
                i += n
                break
        else:
            return None
    return ".".join(out)


def component_of(fields: Mapping[str, Any]) -> str:
    """The component of a pipeline that an adapter of PEFT is of, by its config; empty where that does not say.

    >>> component_of({"auto_mapping": {"base_model_class": "UNet2DConditionModel"}})
    'unet'
    """
    mapping = fields.get("auto_mapping")
    name = str(mapping.get("base_model_class") or "") if isinstance(mapping, Mapping) else ""
    return _CLASSES.get(name, "transformer" if name.endswith(("Transformer2DModel", "Transformer3DModel")) else "")


def module_names(adapter: Adapter, layout: AdapterLayout) -> tuple[dict[str, str], list[str]]:
    """Name in the wanted layout -> name in the adapter, for all modules; and problems, one sentence each."""
    if adapter.layout == layout:
        return {name: name for name in adapter.modules}, []
    if adapter.layout == "pairs":
        return {}, [f"it is a list of pairs without names, which no layout such as '{layout}' can name"]
    component = component_of(adapter.config.fields)
    if adapter.layout == "peft" and not component:
        return {}, [
            "its config does not say which component of a pipeline it is of (auto_mapping.base_model_class, such as "
            f"UNet2DConditionModel), which the layout '{layout}' puts into every name"
        ]
    parts = [p for p in adapter.parts if p] if adapter.layout != "peft" else []
    if layout == "peft" and len(parts) > 1:
        return {}, [f"it is of several models ({', '.join(parts)}), and an adapter of PEFT is of one"]
    out: dict[str, str] = {}
    problems: list[str] = []
    unknown: list[str] = []
    for name, module in adapter.modules.items():
        if module.kind not in ("linear", "convolution") or module.bias is not None:
            problems.append(
                f"module '{name}': the layout '{layout}' holds linear layers and convolutions, without bias"
            )
            continue
        path = unflatten(module.inside) if adapter.layout == "kohya" else module.inside
        renamed = None if path is None else _named(path, module.part or component, layout, parts)
        if renamed is None:
            unknown.append(name)
        elif renamed in out:
            problems.append(f"modules '{name}' and '{out[renamed]}' would both be called '{renamed}'")
        else:
            out[renamed] = name
    if unknown:
        problems.append(_unknown(unknown, layout, adapter.layout))
    return out, problems


def _named(path: str, part: str, layout: AdapterLayout, parts: Sequence[str]) -> str | None:
    """A dotted name inside of a component in another layout; None where that has no name for it."""
    if layout == "peft":
        return path
    if layout == "diffusers":
        return f"{part}.{path}" if part else None
    first = {"text_encoder": "lora_te1_" if "text_encoder_2" in parts else "lora_te_"}
    prefix = (_KOHYA | first).get(part)
    return None if prefix is None else prefix + path.replace(".", "_")


def _unknown(names: Sequence[str], layout: AdapterLayout, own: AdapterLayout) -> str:
    why = (
        "their dots cannot be put back: names of another program's UNet, or of another architecture"
        if own == "kohya"
        else "kohya names those of each transformer as its original code does"
        if layout == "kohya"
        else "the file does not say of which component they are"
    )
    return f"{len(names)} modules, such as '{names[0]}', have no name in the layout '{layout}': {why}"
