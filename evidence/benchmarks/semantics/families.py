"""Tiny models of common families, built from their configs; imported by every version of PEFT and transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VOCABULARY = 40
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_SIZES, "vocab_size": VOCABULARY}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": False}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_hidden_layers": 1}
_VISION = {**_SIZES, "image_size": 8, "patch_size": 4}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 16}
_STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True)
class Family:
    """One family, and the parts of it that adapters name; `a|b` is named b in later versions of transformers.

    Args:
        model: class of transformers.
        config: its config's class, where that is not the model's.
        fields: of the config.
        modules: linear layers to adapt; the last one is a feed-forward layer for (IA)^3.
        table: token table.
        head: output layer.
        stacks: parameters that stack experts.
        convolutions: names of convolutions.
        is_transposed: its layers are Conv1D.
        layers: name of the list of layers.
    """

    model: str
    fields: dict[str, Any]
    modules: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")
    table: str = "embed_tokens"
    head: str = "lm_head"
    stacks: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()
    is_transposed: bool = False
    layers: str = "layers"
    config: Callable[[Any, dict[str, Any]], Any] | None = None

    def build(self, dtype: str = "float64") -> Any:
        """The model with random weights."""
        import torch
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        config = self.config(transformers, self.fields) if self.config else kind.config_class(**self.fields)
        model = kind(config).to(getattr(torch, dtype)).eval()
        with torch.no_grad():  # vectors begin as zeros and ones, which would hide a wrong sum or product
            for parameter in model.parameters():
                if parameter.ndim < 2:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _LLAMA),
    "mistral": Family("MistralForCausalLM", _LLAMA),
    "qwen2": Family("Qwen2ForCausalLM", _LLAMA),
    "qwen2, tied": Family("Qwen2ForCausalLM", _LLAMA | {"tie_word_embeddings": True}),
    "qwen3": Family("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 8}),
    "gemma, tied": Family("GemmaForCausalLM", _LLAMA | {"head_dim": 8, "tie_word_embeddings": True}),
    "phi3, packed": Family("Phi3ForCausalLM", _LLAMA, ("qkv_proj", "gate_up_proj", "down_proj")),
    "gpt2, tied": Family("GPT2LMHeadModel", _GPT2, ("c_attn", "c_fc", "c_proj"), "wte", is_transposed=True, layers="h"),
    "gpt_neox, packed": Family(
        "GPTNeoXForCausalLM", {**_TEXT, "tie_word_embeddings": False}, ("query_key_value", "dense", "dense_4h_to_h"),
        "embed_in", "embed_out|lm_head",
    ),
    "bloom, packed, tied": Family(
        "BloomForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY},
        ("query_key_value", "dense", "dense_4h_to_h"), "word_embeddings", layers="h",
    ),
    "falcon, packed, tied": Family(
        "FalconForCausalLM",
        {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY, "bias": True},
        ("query_key_value", "dense", "dense_4h_to_h"), "word_embeddings", layers="h",
    ),
    "opt, tied": Family(
        "OPTForCausalLM",
        {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY,
         "word_embed_proj_dim": 16, "max_position_embeddings": 16},
        ("q_proj", "v_proj", "fc2"),
    ),
    "mixtral": Family(
        "MixtralForCausalLM", {**_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1},
        ("q_proj", "v_proj", "o_proj"), stacks=_STACKS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {**_LLAMA, **_EXPERTS, "num_experts": 4, "head_dim": 8},
        ("q_proj", "v_proj", "o_proj"), stacks=_STACKS,
    ),
    "olmoe, square stacks": Family(
        "OlmoeForCausalLM",
        {**_LLAMA, "intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1,
         "eos_token_id": 0},
        ("q_proj", "v_proj", "o_proj"), stacks=_STACKS,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {**_LLAMA, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_hidden_layers": 2},
        ("q_a_proj", "kv_b_proj", "o_proj"), stacks=_STACKS,
    ),
    "gpt_oss, transposed stacks": Family(
        "GptOssForCausalLM",
        {**_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8, "num_hidden_layers": 2},
        ("q_proj", "v_proj", "o_proj"), stacks=_STACKS,
    ),
    "bert, tied": Family(
        "BertForMaskedLM", _TEXT, ("query", "value", "output.dense"), "word_embeddings", "decoder", layers="layer"
    ),
    "roberta": Family(
        "RobertaForSequenceClassification", {**_TEXT, "pad_token_id": 1}, ("query", "value", "output.dense"),
        "word_embeddings", "classifier", layers="layer",
    ),
    "t5, tied": Family(
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
        ("q", "v", "wo"), "shared", layers="block",
    ),
    "bart, tied": Family(
        "BartForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24,
         "decoder_ffn_dim": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "max_position_embeddings": 16},
        ("q_proj", "v_proj", "fc2"), "shared",
    ),
    "vit": Family(
        "ViTForImageClassification", {**_VISION, "num_labels": 5},
        ("query|q_proj", "value|v_proj", "output.dense|fc2"), "", "classifier",
        convolutions=("projection",), layers="layer|layers",
    ),
    "clip": Family(
        "CLIPModel", {"projection_dim": 8}, ("q_proj", "v_proj", "fc2"), "token_embedding", "text_projection",
        convolutions=("patch_embedding",),
        config=lambda library, fields: library.CLIPConfig(text_config=_TEXT, vision_config=_VISION, **fields),
    ),
    "llava": Family(
        "LlavaForConditionalGeneration",
        {"image_token_index": 39, "vision_feature_layer": -1, "tie_word_embeddings": False},
        ("q_proj", "v_proj", "down_proj"), convolutions=("patch_embedding",),
        config=lambda library, fields: library.LlavaConfig(
            text_config=library.LlamaConfig(**_LLAMA), vision_config=library.CLIPVisionConfig(**_VISION), **fields),
    ),
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration",
        {"image_token_id": 39, "video_token_id": 38, "tie_word_embeddings": False, "text_config": dict(_LLAMA),
         "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "mlp_ratio": 2,
                           "patch_size": 4}},
        ("q_proj", "qkv", "down_proj"), convolutions=("patch_embed.proj",),
    ),
    "mamba, tied": Family(
        "MambaForCausalLM", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 4},
        ("in_proj", "dt_proj", "x_proj"), "embeddings", convolutions=("conv1d",),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {**_LLAMA, **_EXPERTS, "num_hidden_layers": 2, "head_dim": 8, "num_experts": 3,
         "shared_expert_intermediate_size": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 6, "linear_value_head_dim": 5, "layer_types": ["linear_attention", "full_attention"]},
        ("q_proj", "in_proj_qkvz", "out_proj"), stacks=_STACKS, convolutions=("conv1d",),
    ),
}  # fmt: skip
