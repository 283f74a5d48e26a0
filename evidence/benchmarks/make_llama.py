"""Make a Llama-style checkpoint of random numbers, and experts that differ from it a little.

`make_family` writes `base`, `expert-0`, `expert-1`, ... under a folder: sharded safetensors, `config.json` and a
word-level tokenizer, complete enough for `transformers` and `mergekit`. Every entry depends on the tensor's
name and the checkpoint alone, so a checkpoint can be made again byte for byte.

An expert is `W_t = W_0 + change * rms(W_0) * noise`. The default change of 1e-2 is above the half ulp of bfloat16
(2^-9 = 2e-3 relative), so that the deltas survive the rounding.
"""

from __future__ import annotations

import json
import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

INITIAL_RMS = 0.02


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama; the defaults are those of TinyLlama 1.1 B."""

    hidden: int = 2048
    intermediate: int = 5632
    layers: int = 22
    heads: int = 32
    key_value_heads: int = 4
    vocabulary: int = 32000

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor, in storage order; `lm_head` is not tied."""
        head = self.hidden // self.heads
        key_value = head * self.key_value_heads
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            shapes |= {
                layer + "input_layernorm.weight": (self.hidden,),
                layer + "self_attn.q_proj.weight": (self.hidden, self.hidden),
                layer + "self_attn.k_proj.weight": (key_value, self.hidden),
                layer + "self_attn.v_proj.weight": (key_value, self.hidden),
                layer + "self_attn.o_proj.weight": (self.hidden, self.hidden),
                layer + "post_attention_layernorm.weight": (self.hidden,),
                layer + "mlp.gate_proj.weight": (self.intermediate, self.hidden),
                layer + "mlp.up_proj.weight": (self.intermediate, self.hidden),
                layer + "mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
        return shapes | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocabulary, self.hidden)}

    def parameters(self) -> int:
        """Number of entries of all tensors."""
        return sum(math.prod(shape) for shape in self.tensors().values())

    def config(self, dtype: str) -> dict[str, object]:
        """Contents of `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "vocab_size": self.vocabulary,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": dtype,
        }


def noise(name: str, shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    """Standard normal entries that depend on the name and the kind of device alone."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"0/{name}".encode()))
    return torch.randn(shape, generator=generator, device=device)


def values(name: str, shape: tuple[int, ...], expert: int | None, change: float, device: str) -> Tensor:
    """Tensor `name` of the base (`expert` is None) or of an expert, in float32."""
    is_norm = len(shape) == 1
    base = torch.ones(shape, device=device) if is_norm else noise(name, shape, device).mul_(INITIAL_RMS)
    if expert is None:
        return base
    rms = 1.0 if is_norm else INITIAL_RMS
    return base.add_(noise(f"expert-{expert}/{name}", shape, device), alpha=change * rms)


def write_checkpoint(
    folder: Path,
    size: Size,
    *,
    expert: int | None = None,
    change: float = 1e-2,
    dtype: str = "bfloat16",
    shard_bytes: int = 1 << 30,
    device: str = "cpu",
) -> None:
    """Write one checkpoint: weights, index where there are several shards, config and tokenizer; a shard at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, shapes = getattr(torch, dtype), size.tensors()
    unwritten = {name: torch.empty(shape, dtype=kind, device="meta") for name, shape in shapes.items()}
    split = split_torch_state_dict_into_shards(unwritten, max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        made = {name: values(name, shapes[name], expert, change, device).to("cpu", kind) for name in names}
        save_file(made, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(size.config(dtype), indent=1))
    write_tokenizer(folder, size.vocabulary)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write `tokenizer.json` of a word-level tokenizer with the words `w3`, `w4`, ..., and its config."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    words = [*special, *(f"w{i}" for i in range(len(special), vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def home(work: Path, size: Size, dtype: str) -> Path:
    """Folder of the checkpoints of this size and dtype, shared by the benchmarks."""
    return work / f"llama-{size.parameters() / 1e9:.3g}b-{dtype}"


def make_family(folder: Path, size: Size, experts: int, **how: Any) -> tuple[Path, list[Path]]:
    """`base` and the experts under `folder`; a checkpoint that was finished with the same settings is kept."""
    settings = json.dumps([repr(size), sorted(how.items())], default=str)
    paths = [folder / "base", *(folder / f"expert-{t}" for t in range(experts))]

    def make(number: int) -> None:
        path = paths[number]
        mark = folder / f"{path.name}.settings"  # beside the checkpoint: nothing foreign may lie inside
        if not (mark.exists() and mark.read_text() == settings):
            write_checkpoint(path, size, expert=number - 1 if number else None, **how)
            mark.write_text(settings)

    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(make, range(len(paths))))
    return paths[0], paths[1:]
