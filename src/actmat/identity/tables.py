"""Keys of `config.json` that change what a model computes, by its class: a table that `docs/configs.py` generates."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("configs.json")

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Config fields with the number of layers."""

IGNORED = re.compile(
    r"^_|^(transformers_version|_?name_or_path|auto_map|architectures|model_type|torch_dtype|dtype|vocab_size|\w*vocab_size"
    r"|id2label|label2id|num_labels|finetuning_task|task_specific_params|is_composition|quantization_config"
    r"|tie_\w+|use_cache|use_return_dict|return_\w+|output_(attentions|hidden_states|scores|past|loading_info|retrieved|segmentation|\w*logits)"
    r"|chunk_size_feed_forward|pretraining_tp|gradient_checkpointing|use_\w*kernels?|disable_custom_kernels|use_mambapy"
    r"|attn_implementation|compression_config|unsloth_\w+|tf_legacy_loss|pruned_heads|torchscript|use_bfloat16"
    r"|min_length|max_length|max_new_tokens|do_sample|early_stopping|num_beams|temperature|top_k|top_p|typical_p"
    r"|repetition_penalty|length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids"
    r"|num_return_sequences|diversity_penalty|num_beam_groups|remove_invalid_values|exponential_decay_length_penalty"
    r"|suppress_tokens|begin_suppress_tokens|prefix|sep_token|mask_token|vocab_list|langs"
    r"|scale_attn_weights_init|rescale_prenorm_residual|fp32|freeze\w*|stop_gradient\w*|has_lora_adapter)$"
    r"|token_(id|ids|index|indices)$|_token_\w*id$|(bos|eos|pad|unk|mask|sep|cls)_index$"
    r"|init(ializer)?_(?!target|option|trk)|initializer|_init$|(?<!^token_)dropout|_pdrop|layer_?drop|drop_path|drop_rate|drop_connect"
    r"|(^|_)loss(_|$)|coef(ficient)?(_|$)|_cost$|^matcher_|label_noise|box_noise|label_smoothing|jitter|^mask_(time|feature)_"
    r"|spec_augment|^ctc_|focal_(alpha|gamma)|num_denoising|weight_loss_|(?<!residual)_weight$|_momentum$|num_negatives|training"
)
"""Keys that change no output of a trained model (training, versions, ids of tokens, dtypes, paths, caches, generation),
and those that other parts compare (vocabularies, ties, labels)."""

LOOSE = re.compile(
    r"max_position_embeddings$|^(max_seq(uence)?_len(gth)?|seq_length|n_positions|n_ctx|model_max_length|max_model_len"
    r"|context_length|image_size|sample_size|eval_size)$"
)
"""Keys of lengths up to which a model is meant to be used: they change no output for inputs that all accept."""

TOKEN_IDS = re.compile(r"token_(id|ids|index)$")


def is_ignored(key: str) -> bool:
    """True for keys that change no output of a trained model.

    >>> [is_ignored(k) for k in ("attention_dropout", "eos_token_id", "rms_norm_eps", "rope_theta", "layer_norm_eps")]
    [True, True, False, False, False]
    """
    return IGNORED.search(key) is not None


SCHEDULER: Mapping[str, Any] = {
    "prediction_type": "epsilon",
    "rescale_betas_zero_snr": False,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "trained_betas": None,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": False,
}
"""Entries of the schedulers of diffusers that tell what a model was trained to predict, with their defaults; all others
choose how it is sampled."""


@functools.cache
def _tables() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def class_of(config: Mapping[str, Any], nested: str = "") -> Mapping[str, Any] | None:
    """Entry of the class of a config; None for a class that is in neither library.

    Args:
        config: as `config.json` has it.
        nested: model type that its parent gives a nested config without one.
    """
    tables = _tables()
    if isinstance(name := config.get("_class_name"), str):
        known = tables["diffusers"]["classes"]
        found = known.get(name) or ({"keys": SCHEDULER} if name.endswith("Scheduler") else None)
    else:
        kind = config.get("model_type")
        found = tables["transformers"]["classes"].get(kind if isinstance(kind, str) and kind else nested)
    return found if found is None or isinstance(found, Mapping) else None


@functools.cache
def known_keys() -> frozenset[str]:
    """Keys of any class."""
    classes = [c for library in _tables().values() for c in library["classes"].values()]
    return frozenset(k for c in classes for part in ("keys", "older", "names") for k in c.get(part, ()))


def expand(rule: Mapping[str, Any], config: Mapping[str, Any], depth: int) -> list[Any] | None:
    """The list that follows by a rule of the table from other keys; None if it cannot be told.

    >>> expand({"kind": "every", "period": 2, "on": "full", "off": "sliding"}, {}, 4)
    ['sliding', 'full', 'sliding', 'full']
    >>> expand({"kind": "from", "start": "k", "on": "moe", "off": "mlp"}, {"k": 1}, 3)
    ['mlp', 'moe', 'moe']
    """
    if (gate := rule.get("if")) is not None and not (config.get(gate) and config.get("sliding_window", 1) is not None):
        return [rule["else"]] * depth
    kind = rule.get("kind")
    if kind == "of":
        source = config.get(rule["list"])
        found = [rule["values"].get(str(int(x) if isinstance(x, bool) else x)) for x in source or [None]]
        return None if None in found else found
    number, below = (
        config.get(k) if isinstance(k, str) else k
        for k in (rule.get("start" if kind == "from" else "period"), rule.get("below", depth))
    )
    if not isinstance(number, int) or (number < 1 and kind != "from") or not isinstance(below, int):
        return None
    if kind == "indices":
        return list(range(number - 1, depth, number))
    if kind == "from":
        return [rule["on"] if i >= number else rule["off"] for i in range(depth)]
    shift = 0 if rule.get("first") else 1
    return [rule["off"] if (i + shift) % number and i < below else rule["on"] for i in range(depth)]
