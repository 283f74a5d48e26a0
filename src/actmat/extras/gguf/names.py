"""Supported GGUF architectures: tensor names, reordered rows, and the config in the metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actmat.errors import CheckpointError
from actmat.extras.gguf.header import VOCABULARY, GgufHeader, SkippedList

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM",
}  # fmt: skip
"""Architecture in the metadata -> class in `config.json`."""

MODEL_TYPES = {"gemma3": "gemma3_text"}
"""Architecture -> transformers model type, if the names differ."""

COMPLETE = ("llama", "qwen2", "qwen3")
"""Architectures whose metadata contains a complete config."""

ONE_ADDED = ("gemma2", "gemma3")
"""Architectures whose norm weights llama.cpp stores with 1 added."""

UNUSED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that transformers computes from the config."""

OUTSIDE = ("model.embed_tokens", "model.norm", "lm_head")
INSIDE = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
OTHERS = {
    "phi3": ("self_attn.qkv_proj", "mlp.gate_up_proj"),
    "gemma2": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "gemma3": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
"""Architecture -> additional module names of its layers; a packed module takes the name of its unpacked one."""
MOST_LAYERS = 4096

CONFIG_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
    "vocab_size": "vocab_size",
}
"""Key in the metadata, after the architecture -> field of `config.json`."""

BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
"""Field of a Llama's `config.json` -> layers of each block that have a bias if it is set."""

TOKENS = {
    f"tokenizer.ggml.{k}_token_id": f"{f}_token_id" for k, f in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"))
}


def names_of(header: GgufHeader, location: str) -> dict[str, str]:
    """Name in the file -> name in transformers, from the map of the package gguf.

    Raises:
        CheckpointError: an unsupported architecture, or unknown tensors, which are all named.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture, layers = architecture_of(header, location), header.metadata.get(f"{_arch(header)}.block_count")
    if not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
        raise CheckpointError(f"{location}: expected a number of layers in the metadata, found {str(layers)[:40]}")
    table = get_tensor_name_map(next(k for k, v in MODEL_ARCH_NAMES.items() if v == architecture), layers)
    known: dict[str, str] = {}
    for stem in (
        *OUTSIDE,
        *(f"model.layers.{i}.{inner}" for i in range(layers) for inner in (*INSIDE, *OTHERS.get(architecture, ()))),
    ):
        name_there = table.get_name(stem)
        known |= {f"{name_there}.{part}": f"{stem}.{part}" for part in ("weight", "bias") if name_there is not None}
    strange = [t.name for t in header.tensors if t.name not in known and t.name not in UNUSED]
    if strange:
        raise CheckpointError(
            f"{location}: tensors that a transformers {architecture} model does not have. Fix: give the "
            "safetensors checkpoint that the file was converted from",
            [f"{location}: tensor {name[:120]!r} has no name in transformers" for name in strange[:20]],
        )
    return {t.name: known[t.name] for t in header.tensors if t.name in known}


def architecture_of(header: GgufHeader, location: str) -> str:
    """The architecture that the metadata names.

    Raises:
        CheckpointError: not a model, or the architecture is not supported.
    """
    if (kind := str(header.metadata.get("general.type", "model"))) != "model":
        raise CheckpointError(
            f"{location}: expected a GGUF file of a model, found one of type {kind[:80]!r}. Fix: give the model; of an "
            "adapter, the folder or file that it was converted from."
        )
    if (architecture := _arch(header)) not in ARCHITECTURES:
        raise CheckpointError(
            f"{location}: expected a GGUF file of {', '.join(ARCHITECTURES)}, found {architecture[:80]!r}: its tensors "
            "may be in another order than in transformers. Fix: give the safetensors it was converted from."
        )
    return architecture


def rotated_heads(header: GgufHeader, name: str) -> int:
    """Number of heads of a tensor whose rows are in llama.cpp's rotary order; 0 for any other tensor."""
    if _arch(header) != "llama" or not (".attn_q." in name or ".attn_k." in name):
        return 0
    heads = header.metadata.get("llama.attention.head_count")
    heads_of_layer = header.metadata.get("llama.attention.head_count_kv", heads) if ".attn_k." in name else heads
    return heads_of_layer if isinstance(heads_of_layer, int) and heads_of_layer > 0 else -1


def added(header: GgufHeader, name: str) -> float:
    """Constant that llama.cpp added to every entry of a tensor."""
    return 1.0 if _arch(header) in ONE_ADDED and name.endswith("norm.weight") else 0.0


def undescribed(header: GgufHeader) -> str:
    """Clause that names the config values missing in the metadata; empty if it is complete."""
    architecture = _arch(header)
    scaled = str(header.metadata.get(f"{architecture}.rope.scaling.type", "none")) != "none"
    if scaled or any(t.name in UNUSED for t in header.tensors):
        return "its rotary embeddings are scaled, but the file does not contain the parameters"
    if architecture == "llama" and any(_has_biases(header, layers) is None for layers in BIASES.values()):
        return "only some layers of a kind have a bias, which a Llama config cannot express"
    if architecture not in COMPLETE:
        return f"the metadata of {architecture} does not contain a complete config"
    return ""


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The metadata as a `config.json` of transformers."""
    architecture = _arch(header)
    config: dict[str, Any] = {"model_type": MODEL_TYPES.get(architecture, architecture)}
    config["architectures"] = [ARCHITECTURES.get(architecture, "")]
    stated = {f"{architecture}.{k}": field for k, field in CONFIG_KEYS.items()} | TOKENS
    config |= {f: v for k, f in stated.items() if isinstance(v := header.metadata.get(k), int | float)}
    tokens: Mapping[str, Any] = header.metadata
    if "vocab_size" not in config and isinstance(skipped := tokens.get(VOCABULARY), SkippedList):
        config["vocab_size"] = skipped.count
    if architecture == "llama":
        config |= {field: True for field, layers in BIASES.items() if _has_biases(header, layers) is not False}
    tied = all(t.name != "output.weight" for t in header.tensors)
    return config | {"tie_word_embeddings": tied, "dtype": "bfloat16"}


def _has_biases(header: GgufHeader, layers: Sequence[str]) -> bool | None:
    """True if these layers have a bias in all blocks, False if in no block, else None."""
    names = {t.name for t in header.tensors}
    blocks = {name.split(".")[1] for name in names if name.startswith("blk.")}
    present = {f"blk.{block}.{layer}.bias" in names for block in blocks for layer in layers}
    return None if len(present) > 1 else True in present


def _arch(header: GgufHeader) -> str:
    return str(header.metadata.get("general.architecture", ""))
