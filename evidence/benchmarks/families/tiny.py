"""Tiny models of every architecture class of transformers and diffusers, from their configs, shrunk by rule."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MOST_PARAMETERS = 12_000_000
VOCABULARY = 120

# first pattern that matches the name of an entry decides; the value replaces a larger one
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|n_vocab|vocab_size_or_config_json_file|entity_vocab_size", VOCABULARY),
    (r".*(?:num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|kv_n_heads)", 2),
    (r"(?:.*_)?(?:num_attention_heads|n_heads?|num_heads|attention_heads|heads)", 4),
    (r"(?:.*_)?(?:num_hidden_layers|n_layers?|num_layers|(?:en|de)coder_layers|depth|num_block\w*)", 2),
    (r"(?:.*_)?(?:num_single_layers|layers_per_block|num_res_blocks|num_\w*layers)", 1),
    (r"(?:.*_)?(?:n_routed_experts|num_experts|num_local_experts|moe_num_experts|n_experts)", 4),
    (r"(?:.*_)?(?:num_experts_per_tok\w*|top_k|experts_per_tok\w*|moe_k)", 2),
    (r"(?:attention_)?head_dim|d_kv|\w*_head_dim|head_size", 8),
    (r"(?:\w*_)?(?:intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|feedforward_size|d_inner)", 48),
    (r"(?:\w*_)?(?:hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|dim|n_embed|embed_dims?|width|emb_dim|"
     r"projection_dim|cross_attention_dim|joint_attention_dim|pooled_projection_dim|caption_channels|projection_size|"
     r"hidden|embeddings?_dim|attention_hidden_size|model_dim|channels|conv_dim)", 32),
    (r"(?:\w*_)?(?:max_position_embeddings|n_positions|max_seq_len\w*|n_ctx|max_source_positions|max_target_positions|"
     r"max_sequence_length|max_length|seq_length)", 64),
    (r"(?:input_|crop_)?(?:image_size|img_size)", 32),
    (r"sample_size", 8),
    (r"patch_size", 8),
    (r"num_queries|num_query_tokens|num_latents|num_detection_tokens", 5),
    (r"num_mel_bins|n_mels|num_mel_filters", 16),
    (r"(?:\w*_)?(?:q_lora_rank|kv_lora_rank|lora_rank)", 16),
    (r"(?:mamba_|ssm_)?(?:d_state|state_size)|ssm_state_size", 8),
    (r"num_groups|norm_num_groups|n_groups", 4),
)  # fmt: skip
_LISTS: tuple[tuple[str, int], ...] = (
    (r"depths|num_blocks|layers_per_stage|encoder_depths|decoder_depths|layers", 1),
    (r"(?:\w*_)?(?:num_attention_heads|num_heads)", 2),
    (
        r"(?:\w*_)?(?:hidden_sizes|block_out_channels|embed_dims?|dims|channels|num_channels|neck_hidden_sizes|conv_dim)",
        32,
    ),
)


_HEADS = """
CAUSAL_LM SEQ_TO_SEQ_CAUSAL_LM MASKED_LM IMAGE_TEXT_TO_TEXT SPEECH_SEQ_2_SEQ CTC IMAGE_CLASSIFICATION OBJECT_DETECTION
SEMANTIC_SEGMENTATION DEPTH_ESTIMATION AUDIO_CLASSIFICATION MASK_GENERATION VIDEO_CLASSIFICATION
ZERO_SHOT_IMAGE_CLASSIFICATION MULTIMODAL_LM TIME_SERIES_PREDICTION
"""
"""Kinds of heads; the first that a model type has is its class here."""


class TooLarge(Exception):
    """The shrunk config still gives a model that is not tiny."""


@dataclass(frozen=True)
class Architecture:
    """One class of a library."""

    library: str
    name: str
    model_type: str = ""


def architectures() -> Iterator[Architecture]:
    """One class per model type of transformers (that with a head, where there is one), every model of diffusers."""
    from transformers.models.auto import modeling_auto as auto

    found: dict[str, str] = {}
    for kind in _HEADS.split():
        for model_type, names in getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").items():
            found.setdefault(model_type, names if isinstance(names, str) else names[0])
    for model_type, names in auto.MODEL_MAPPING_NAMES.items():
        found.setdefault(model_type, names if isinstance(names, str) else names[0])
    seen = set()
    for model_type, name in sorted(found.items()):
        if name not in seen:
            seen.add(name)
            yield Architecture("transformers", name, model_type)
    import diffusers

    for name in sorted(dir(diffusers.models) + dir(diffusers)):
        if re.search(r"(?:Model|Transformer\w*|Autoencoder\w*|VQModel|UNet\w*)$", name) and name not in seen:
            kind = getattr(diffusers, name, None)
            if inspect.isclass(kind) and issubclass(kind, diffusers.ModelMixin) and kind is not diffusers.ModelMixin:
                seen.add(name)
                yield Architecture("diffusers", name)


def build(one: Architecture) -> Any:
    """A random tiny model, in float32, for inference.

    Raises:
        TooLarge: it would not be tiny.
        Exception: whatever the class says of a config that was shrunk by rule.
    """
    import transformers

    torch.manual_seed(0)
    if one.library == "transformers":
        kind = getattr(transformers, one.name)
        config = shrunk_config(kind.config_class)
        _check_size(lambda: kind(config))
        return kind(config).eval()
    import diffusers

    kind = getattr(diffusers, one.name)
    parameters = inspect.signature(kind.__init__).parameters
    given = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    values = {n: v for n, v in shrunk(given).items() if v != given[n]}
    if "axes_dims_rope" in given:
        values["axes_dims_rope"] = (2, 2, 4)
    _check_size(lambda: kind(**values))
    return kind(**values).eval()


def _check_size(make: Any) -> None:
    try:
        with torch.device("meta"):
            total = sum(p.numel() for p in make().parameters())
    except (NotImplementedError, RuntimeError):  # a class that computes with its weights while it is built
        return
    if total > MOST_PARAMETERS:
        raise TooLarge(f"{total:,} parameters")


def shrunk_config(kind: Any) -> Any:
    """A config of a transformers class with small sizes, those of its towers as well."""
    default = kind()
    nested = {n: getattr(default, n, None) for n in getattr(kind, "sub_configs", {})}
    values = shrunk({k: v for k, v in default.to_dict().items() if k not in nested}, kind)
    changed = {k: v for k, v in values.items() if v != getattr(default, k, None) and hasattr(default, k)}
    for name, value in nested.items():
        if value is not None and hasattr(value, "to_dict"):
            changed[name] = shrunk_config(type(value))
    for token in ("pad", "bos", "eos", "sep", "cls", "decoder_start"):
        key = f"{token}_token_id"
        if hasattr(default, key) and isinstance(getattr(default, key), int | list):
            changed[key] = {"pad_token_id": 0, "bos_token_id": 1}.get(key, 2)
    for key in ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "vision_start_token_id"):
        if isinstance(getattr(default, key, None), int):
            changed[key] = VOCABULARY - 1
    config = kind(**changed)
    config.use_cache = False
    return config


def shrunk(values: Mapping[str, Any], kind: Any = None) -> dict[str, Any]:
    """The values with every size that is larger than the tiny one replaced by it."""
    aliases = getattr(kind, "attribute_map", {}) or {}
    out = {}
    for name, value in values.items():
        key = next((a for a, target in aliases.items() if target == name and _tiny(a, _SIZES) is not None), name)
        out[name] = _shrunk_value(key, value)
    if isinstance(out.get("layer_types"), list):
        kinds, count = out["layer_types"], out.get("num_hidden_layers", 2)
        out["layer_types"] = [*dict.fromkeys(kinds), *kinds][:count] if count else kinds  # different ones first
    return out


def _shrunk_value(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        tiny = _tiny(name, _SIZES)
        return value if tiny is None or value <= tiny else tiny
    if isinstance(value, list | tuple) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        tiny = _tiny(name, _LISTS) or _tiny(name, _SIZES)
        return value if tiny is None else type(value)(min(v, tiny) for v in value)
    return value


def _tiny(name: str, table: tuple[tuple[str, int], ...]) -> int | None:
    return next((size for pattern, size in table if re.fullmatch(pattern, name)), None)


def parameters_of(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())
