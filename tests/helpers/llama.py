"""Tiny Llamas of random numbers on disk, complete enough for transformers: the same bytes every time."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
INITIAL_RMS = 0.02
CHANGE = 0.01
"""Of an expert, relative to the weights: above the half unit of bfloat16, so that it survives the rounding."""


def shapes_of(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Llama whose head is not tied."""
    width, inner, words = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    shared = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (shared, width),
        "self_attn.v_proj": (shared, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    layers = {f"model.layers.{i}.{n}": s for i in range(sizes["num_hidden_layers"]) for n, s in layer.items()}
    all_shapes = {"model.embed_tokens": (words, width), **layers, "model.norm": (width,), "lm_head": (words, width)}
    return {f"{name}.weight": shape for name, shape in all_shapes.items()}


def noise(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Standard normal entries that depend on the name and the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode())))


def write_llama(folder: Path, sizes: Mapping[str, int] = LLAMA, *, expert: int | None = None) -> None:
    """The base, or an expert that differs from it a little, in bfloat16, with a config and a tokenizer of words."""
    tensors = {}
    for name, shape in shapes_of(sizes).items():
        rms = 1.0 if len(shape) == 1 else INITIAL_RMS
        value = torch.ones(shape) if len(shape) == 1 else noise(name, shape, 0) * INITIAL_RMS
        if expert is not None:
            value.add_(noise(f"expert-{expert}/{name}", shape, 0), alpha=CHANGE * rms)
        tensors[name] = value.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    _write_in_order(folder / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, sizes["vocab_size"])


def _write_in_order(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file with the tensors in this order; `save_file` would sort them by name."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_tokenizer(folder: Path, words: int) -> None:
    """`tokenizer.json` with the words `w3`, `w4`, ..., and its config."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    vocabulary = [*special.values(), *(f"w{i}" for i in range(len(special), words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
