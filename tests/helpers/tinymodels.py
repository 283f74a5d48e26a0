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


def build(family: str, *, experts: int = 3) -> Any:
    """A tiny model of a family, random weights, eval mode; mixtures have so many experts."""
    import transformers as hf

    torch.manual_seed(0)
    llama = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60}
    gqa = {**llama, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    bert = {**llama, "num_attention_heads": 4}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 16}
    t5 = {"vocab_size": 60, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    clip = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    moe = {"num_local_experts": experts, "num_experts_per_tok": 2}
    falcon = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
    makers = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**gqa)),
        "llama_tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**gqa, tie_word_embeddings=True)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**gqa, **moe)),
        "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
            hf.Qwen2MoeConfig(
                **gqa, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=16,
                shared_expert_intermediate_size=20,
            )
        ),
        "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**gqa, **moe, head_dim=8)),
        "granitemoe": lambda: hf.GraniteMoeForCausalLM(hf.GraniteMoeConfig(**gqa, **moe)),
        "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**gqa)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "gpt_bigcode": lambda: hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**gpt2)),
        "gpt_bigcode_heads": lambda: hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**gpt2, multi_query=False)),
        "codegen": lambda: hf.CodeGenForCausalLM(hf.CodeGenConfig(**gpt2, rotary_dim=4)),
        "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**bert)),
        "falcon_mq": lambda: hf.FalconForCausalLM(hf.FalconConfig(**falcon, multi_query=True)),
        "falcon_heads": lambda: hf.FalconForCausalLM(hf.FalconConfig(**falcon, multi_query=False)),
        "falcon_new": lambda: hf.FalconForCausalLM(
            hf.FalconConfig(**falcon, new_decoder_architecture=True, num_kv_heads=2)
        ),
        "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=60)),
        "mpt": lambda: hf.MptForCausalLM(hf.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=60)),
        "modernbert": lambda: hf.ModernBertForMaskedLM(hf.ModernBertConfig(**bert, pad_token_id=0)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**bert)),
        "deberta": lambda: hf.DebertaModel(hf.DebertaConfig(**bert)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5, feed_forward_proj="gated-gelu")),
        "clip": lambda: hf.CLIPModel(
            hf.CLIPConfig(
                text_config={**clip, "vocab_size": 60},
                vision_config={**clip, "image_size": 16, "patch_size": 8},
                projection_dim=24,
            )
        ),
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**clip, image_size=16, patch_size=8, num_labels=5)),
        "resnet": lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5)
        ),
        "qwen3_next": lambda: hf.Qwen3NextForCausalLM(
            hf.Qwen3NextConfig(
                **gqa,
                head_dim=8,
                num_experts=3,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=20,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=6,
                linear_value_head_dim=5,
                layer_types=["linear_attention", "full_attention"],
            )
        ),
        "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=60)),
        "whisper": lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
                encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=60, num_mel_bins=8, max_source_positions=16,
                max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            )
        ),
    }  # fmt: skip
    return makers[family]().eval()
