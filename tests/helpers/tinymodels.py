"""Tiny transformers models built from config: what they are in memory, and what lies on disk after a save."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from actmat.checkpoints.base import DTYPES, TensorSpec

_NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}


@dataclass(frozen=True)
class Tiny:
    """A model, the specs and config of its checkpoint on disk."""

    model: nn.Module
    specs: dict[str, TensorSpec]
    config: dict[str, Any]


def specs_of(state: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Specs of a state dict."""
    return {k: TensorSpec(k, tuple(v.shape), _NAMES[v.dtype], "<memory>") for k, v in state.items()}


def saved(model: Any, folder: Path) -> Tiny:
    """Save a transformers model and read back names, shapes and config from disk."""
    model.save_pretrained(folder)
    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - safe_open is no dict
                state[name] = handle.get_tensor(name)
    return Tiny(model, specs_of(state), json.loads((folder / "config.json").read_text()))


AUTO = {"bert": "ForMaskedLM", "modernbert": "ForMaskedLM", "deberta": "", "clip": "", "t5": "ForSeq2SeqLM",
        "whisper": "ForSpeechSeq2Seq", "vit": "ForImageClassification", "resnet": "ForImageClassification"}  # fmt: skip
"""Kind of model -> end of the name of the class that makes it, where that is not `AutoModelForCausalLM`."""


def made(kind: str, *, seed: int = 0, **fields: Any) -> Any:
    """The model that transformers makes of a config, random weights, eval mode."""
    import transformers as hf

    torch.manual_seed(seed)
    maker = getattr(hf, f"AutoModel{AUTO.get(kind, 'ForCausalLM')}")
    return maker.from_config(hf.AutoConfig.for_model(kind, **fields)).eval()


WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CLIP = {**WIDTHS, "intermediate_size": 48}
BERT = {**CLIP, "vocab_size": 60}
GQA = {**BERT, "num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 16}
SHARED = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 20}
FALCON = {**WIDTHS, "vocab_size": 60}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GQA),
    "llama_tied": ("llama", GQA | {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", GQA | {"num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", GQA | SHARED | {"num_experts_per_tok": 2}),
    "gpt_oss": ("gpt_oss", GQA | {"num_experts_per_tok": 2, "head_dim": 8}),
    "granitemoe": ("granitemoe", GQA | {"num_experts_per_tok": 2}),
    "phi3": ("phi3", GQA),
    "gpt2": ("gpt2", GPT2),
    "gpt_bigcode": ("gpt_bigcode", GPT2),
    "gpt_bigcode_heads": ("gpt_bigcode", GPT2 | {"multi_query": False}),
    "codegen": ("codegen", GPT2 | {"rotary_dim": 4}),
    "gpt_neox": ("gpt_neox", BERT),
    "falcon_mq": ("falcon", FALCON | {"multi_query": True}),
    "falcon_heads": ("falcon", FALCON | {"multi_query": False}),
    "falcon_new": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 60}),
    "modernbert": ("modernbert", BERT | {"pad_token_id": 0}),
    "bert": ("bert", BERT),
    "deberta": ("deberta", BERT),
    "t5": ("t5", {"vocab_size": 60, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4,
                  "feed_forward_proj": "gated-gelu"}),
    "clip": ("clip", {"text_config": CLIP | {"vocab_size": 60}, "projection_dim": 24,
                      "vision_config": CLIP | {"image_size": 16, "patch_size": 8}}),
    "vit": ("vit", CLIP | {"image_size": 16, "patch_size": 8, "num_labels": 5}),
    "resnet": ("resnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}),
    "qwen3_next": ("qwen3_next", GQA | SHARED | {
        "head_dim": 8, "num_experts": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 6, "linear_value_head_dim": 5, "layer_types": ["linear_attention", "full_attention"]}),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 60}),
    "whisper": ("whisper", {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 60,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
        "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1}),
}  # fmt: skip
MIXTURES = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "granitemoe": "num_local_experts",
            "qwen2_moe": "num_experts"}  # fmt: skip


def build(family: str, *, experts: int = 3) -> Any:
    """A tiny model of a family; mixtures have so many experts."""
    kind, fields = FAMILIES[family]
    return made(kind, **fields, **({MIXTURES[family]: experts} if family in MIXTURES else {}))
