"""Entries of a config that may change what a model computes, in one spelling, and those of two configs that differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

Place = tuple[str, ...]
"""Keys that lead to an entry."""
ABSENT: Final = "absent"
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Entries with the number of layers."""
ROPE: Final = "rope_parameters"
HARMLESS = re.compile(
    r"^(_?name_or_path|_(class_name|commit_hash|from_model_config|use_default_values|\w*(implementation|version|dtype)\w*)"
    r"|transformers_version|auto_map|architectures|model_type|torch_dtype|dtype"
    r"|((src|tgt|text|image|audio|entity|input|output)_)?vocab_size"
    r"|id2label|label2id|num_labels|finetuning_task|is_composition|quantization_config"
    r"|tie_\w+|use_cache|use_return_dict|return_\w+|output_(attentions|hidden_states|scores|past|loading_info|retrieved|segmentation|\w*logits)"
    r"|chunk_size_feed_forward|pretraining_tp|gradient_checkpointing|use_\w*kernels?|disable_custom_kernels|use_mambapy"
    r"|attn_implementation|compression_config|unsloth_\w+|tf_legacy_loss|pruned_heads|torchscript|use_bfloat16"
    r"|sep_token|mask_token|vocab_list|langs"
    r"|scale_attn_weights_init|fp32|freeze\w*|stop_gradient\w*|has_lora_adapter)$"
    r"|token_indices$|_token_(?!id)\w*id$|(bos|eos|pad|unk|mask|sep|cls)_index$"
    r"|init(ializer)?_(?!target|option|trk)|initializer|_init$|(?<!^token_)dropout|_pdrop|layer_?drop|drop_path|drop_rate|drop_connect"
    r"|(^|_)loss(_|$)|coef(ficient)?(_|$)|_cost$|^matcher_|label_noise|box_noise|label_smoothing|jitter|^mask_(time|feature)_"
    r"|spec_augment|^ctc_|focal_(alpha|gamma)|num_denoising|weight_loss_|(?<!residual)_weight$|_momentum$|num_negatives|training"
)
"""Entries that change no output of a trained model (training, releases, ids of tokens, dtypes, paths, caches), and
those that other parts compare (vocabularies, ties, labels)."""
_USAGE = re.compile(
    r"^(problem_type|task_specific_params|prefix|min_length|max_length|max_new_tokens|do_sample|early_stopping|num_beams"
    r"|temperature|top_k|top_p|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|bad_words_ids"
    r"|encoder_no_repeat_ngram_size|num_return_sequences|diversity_penalty|num_beam_groups|remove_invalid_values"
    r"|exponential_decay_length_penalty|suppress_tokens|begin_suppress_tokens)$"
)
"""Entries by which a library uses what a model computes: in pipelines, and in generation without a file of its own."""
_COUNTS = {("tapas", "temperature"), ("phimoe", "router_jitter_noise"), ("audio-spectrogram-transformer", "max_length"),
           ("flava_image_model", "mask_token"), ("pp_lcnet", "hidden_dropout_prob")}  # fmt: skip
"""Type of model and entry that changes what it computes, though its name is one of the harmless."""
LISTED = {
    "layer_types": ("full_attention_interval", "global_attn_every_n_layers", "layer_group_size", "max_window_layers",
                    "sliding_window_pattern", "_sliding_window_pattern", "use_sliding_window"),
    "mlp_layer_types": ("first_k_dense_replace",),
    "no_rope_layers": ("no_rope_layer_interval",),
    "moe_layers": ("interleave_moe_layer_step",),
}  # fmt: skip
"""List with an entry per layer -> entries from which classes make it, which mean nothing beside it."""
_ROPE_BEFORE = ("rope_scaling", "rope_theta", "partial_rotary_factor")
_ROPE_TYPES = {"su": "longrope", "mrope": "default"}
_SYNONYMS = ({"silu", "swish"}, {"gelu", "gelu_python"}, {"gelu_new", "gelu_fast", "gelu_pytorch_tanh"})


def unequal_entries(
    base: Mapping[str, Any], expert: Mapping[str, Any], at: Place = ()
) -> Iterator[tuple[Place, Any, Any]]:
    """Place and both values of entries that differ and are not harmless; a nested config that one lacks is one entry.

    >>> list(unequal_entries({"rope_theta": 5e5, "use_cache": True}, {"rope_parameters": {"rope_theta": 1e6}}))
    [(('rope_parameters', 'rope_theta'), 500000.0, 1000000.0)]
    """
    ours, theirs = (c if ROPE in at else _spelled(c) for c in (base, expert))
    for key in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(key), theirs.get(key)
        if ROPE not in at and is_harmless(key, base.get("model_type")):
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from unequal_entries(a, b, (*at, str(key)))
        elif not same(a, b):
            yield (*at, str(key)), ours.get(key, ABSENT), theirs.get(key, ABSENT)


def is_harmless(key: str, model_type: Any = None) -> bool:
    """True for an entry that changes no output of a trained model, or that other parts compare.

    >>> [is_harmless(k) for k in ("attention_dropout", "_name_or_path", "_remove_final_layer_norm", "rope_theta")]
    [True, True, False, False]
    """
    return HARMLESS.search(str(key)) is not None and (str(model_type), str(key)) not in _COUNTS


def is_usage(key: str, model_type: Any = None) -> bool:
    """True for an entry by which a library uses what a model computes."""
    return _USAGE.search(str(key)) is not None and (str(model_type), str(key)) not in _COUNTS


def _spelled(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in transformers 5's spelling: one entry for rotary embeddings, none that a list of layers replaces."""
    out = {k: v for k, v in config.items() if k not in _ROPE_BEFORE} | _rope(config)
    types = out.get("layer_types")
    is_full = isinstance(types, list) and all(t == "full_attention" for t in types)
    unused = [key for name, keys in LISTED.items() if out.get(name) for key in keys]
    if out.get("use_sliding_window") is False:
        unused += ["sliding_window", "max_window_layers", "use_sliding_window", *["layer_types"] * is_full]
    if is_full:
        unused.append("sliding_window")
    return {k: v for k, v in out.items() if k not in unused}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entry for rotary embeddings, of all layers or by the type of a layer; and others beside it that differ."""
    rope = config.get(ROPE)
    beside = {k: config[k] for k in _ROPE_BEFORE if config.get(k) is not None}
    if not rope:
        scaling = beside.pop("rope_scaling", {})
        rope, beside = ({**beside, **scaling}, {}) if isinstance(scaling, Mapping) else (scaling, beside)
    if not rope:
        return beside
    if not isinstance(rope, Mapping):
        return {ROPE: rope, **beside}
    beside = {k: v for k, v in beside.items() if not same(v, rope.get(k))}
    if any(isinstance(v, Mapping) for v in rope.values()):
        return {ROPE: {k: _plain_rope(v) if isinstance(v, Mapping) else v for k, v in rope.items()}, **beside}
    return {ROPE: _plain_rope(rope), **beside}


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    out = {"partial_rotary_factor": 1, **rope, "rope_type": _ROPE_TYPES.get(kind, kind)}
    return {k: v for k, v in out.items() if k != "type"}


def same(a: Any, b: Any) -> bool:
    """True for values that mean the same: numbers up to float32's rounding, tuples as lists, names of activations."""
    if isinstance(a, int | float) and isinstance(b, int | float) and isinstance(a, bool) == isinstance(b, bool):
        return a == b or math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        ours, theirs = ({str(k): v for k, v in x.items()} for x in (a, b))
        return ours.keys() == theirs.keys() and all(same(v, theirs[k]) for k, v in ours.items())
    return bool(a == b) or any({str(a), str(b)} <= names for names in _SYNONYMS)


def label_names(config: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """Names of a classifier's labels, in the order of its rows; None without any, or for generic names.

    >>> label_names({"id2label": {"1": "pos", "0": "neg"}}), label_names({"id2label": {"0": "LABEL_0"}})
    (('neg', 'pos'), None)
    >>> label_names({"label2id": {"pos": 1, "neg": 0}})
    ('neg', 'pos')
    """
    names, rows = ((config or {}).get(key) for key in ("id2label", "label2id"))
    if names is None and isinstance(rows, Mapping):
        names = {str(row): name for name, row in rows.items()}
    if not isinstance(names, Mapping) or not all(str(k).isdecimal() and len(str(k)) < 9 for k in names):
        return None
    in_order = tuple(str(names[k]) for k in sorted(names, key=lambda k: int(str(k))))
    return None if not in_order or in_order == tuple(f"LABEL_{i}" for i in range(len(in_order))) else in_order
