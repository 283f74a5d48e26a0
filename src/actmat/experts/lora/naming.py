"""Names of one module in the layouts of adapters: PEFT's, diffusers', kohya's.

| layout | `to_q` of the first attention of a UNet |
|---|---|
| peft, one model per folder | `down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q` |
| diffusers, a file for a pipeline | `unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q` |
| kohya, a file for a pipeline | `lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q` |

From kohya's to the others dots must be put back. That is done for the words that occur in UNets and CLIP text encoders
of diffusers and transformers; another word is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.modules import AdapterLayout

__all__ = ["component_of", "module_names", "unflatten"]

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
