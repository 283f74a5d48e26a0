"""Small checkpoints, adapters, texts and recipes, made from random numbers, for merges whose bytes are compared.

Weights and deltas of matrices have singular values `i^-1/2` and `i^-1`, as trained ones have steep spectra. The tables
of the Llama have more entries than the blocks in which elementwise methods read, and no multiple of their size.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.make_llama import INITIAL_RMS, Size, shard_files, write_tokenizer

LLAMA = Size(hidden=64, intermediate=176, layers=2, heads=4, key_value_heads=2, vocabulary=9001)
EXPERTS = ("math", "code", "law")
SHARD_BYTES = 1_000_000
DELTA = 0.1
"""Norm of a delta over the norm of the base's tensor."""

Shapes = Mapping[str, tuple[int, ...]]


def make_inputs(folder: Path) -> None:
    """Write everything that the merges of `benchmarks.comparison.merges` read, statistics left out."""
    for name, tensors in _family(LLAMA.tensors()):
        config = LLAMA.config("float32")
        _write(folder / "llama" / name, tensors, config)
        write_tokenizer(folder / "llama" / name, LLAMA.vocabulary)
        _write(folder / "sharded" / name, tensors, config, SHARD_BYTES)
        halves = {key: tensor.bfloat16() for key, tensor in tensors.items()}
        _write(folder / "bfloat16" / name, halves, LLAMA.config("bfloat16"))
    for name, tensors in _family(_gpt2()):
        _write(folder / "gpt2" / name, tensors, _GPT2_CONFIG)
    for name, tensors in _family(_mixture()):
        _write(folder / "mixture" / name, tensors, _MIXTURE_CONFIG)
    _adapters(folder / "adapters")
    for number, name in enumerate(EXPERTS):
        words = torch.randint(3, LLAMA.vocabulary, (8, 12), generator=_generator(f"text-{number}")).tolist()
        lines = [json.dumps({"text": " ".join(f"w{word}" for word in line)}) for line in words]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def random_tensor(name: str, shape: tuple[int, ...], decay: float) -> Tensor:
    """Float32 tensor of root mean square 1; singular values of its matrices fall as `i^-decay`."""
    noise = torch.randn(shape, generator=_generator(name))
    if len(shape) > 1 and min(shape[-2:]) > 1:
        rank = min(shape[-2:])
        left = torch.linalg.qr(noise if shape[-2] >= shape[-1] else noise.mT).Q
        right = torch.linalg.qr(torch.randn(*shape[:-2], rank, rank, generator=_generator(f"right/{name}"))).Q
        noise = (left * torch.arange(1, rank + 1) ** -decay) @ right
        noise = noise if shape[-2] >= shape[-1] else noise.mT.contiguous()
    return noise * (math.sqrt(noise.numel()) / noise.norm())


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


# Full checkpoints


def _family(shapes: Shapes) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Name and tensors of the base and of each expert."""
    base = {name: _base(name, shape) for name, shape in shapes.items()}
    yield "base", base
    for expert in EXPERTS:
        size = {name: DELTA * float(weight.square().mean().sqrt()) for name, weight in base.items()}
        yield expert, {n: w + size[n] * random_tensor(f"{expert}/{n}", tuple(w.shape), 1.0) for n, w in base.items()}


def _base(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1 and name.endswith("weight"):
        return torch.ones(shape)
    return INITIAL_RMS * random_tensor(name, shape, 0.5)


def _write(folder: Path, tensors: Mapping[str, Tensor], config: dict[str, Any], shard_bytes: int = 1 << 40) -> None:
    """Write one checkpoint, with an index where there are several shards."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    itemsize = next(iter(tensors.values())).itemsize
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    for file, part in shard_files(folder, shapes, itemsize, shard_bytes).items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})


_GPT2_CONFIG = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 32, "vocab_size": 200,
}  # fmt: skip


def _gpt2() -> dict[str, tuple[int, ...]]:
    """Shapes of a GPT-2: matrices are stored `I x O`, queries, keys and values packed in `c_attn`."""
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (200, 64), "transformer.wpe.weight": (32, 64)}
    for i in range(2):
        layer = f"transformer.h.{i}."
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{layer}{name}.weight": (64,), f"{layer}{name}.bias": (64,)}
        widths = {"attn.c_attn": (64, 192), "attn.c_proj": (64, 64), "mlp.c_fc": (64, 256), "mlp.c_proj": (256, 64)}
        for name, shape in widths.items():
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[1:]}
    return shapes | {"transformer.ln_f.weight": (64,), "transformer.ln_f.bias": (64,)}


_MIXTURE_CONFIG = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 48, "intermediate_size": 40,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 3,
    "vocab_size": 200,
}  # fmt: skip


def _mixture() -> dict[str, tuple[int, ...]]:
    """Shapes of a mixture of experts: stacks in three dimensions, gate and up in alternating rows."""
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": (200, 48),
        layer + "self_attn.q_proj.weight": (48, 48),
        layer + "self_attn.o_proj.weight": (48, 48),
        layer + "mlp.router.weight": (3, 48),
        layer + "mlp.experts.gate_up_proj": (3, 48, 80),
        layer + "mlp.experts.gate_up_proj_bias": (3, 80),
        layer + "mlp.experts.down_proj": (3, 40, 48),
        layer + "mlp.experts.down_proj_bias": (3, 48),
        "model.norm.weight": (48,),
        "lm_head.weight": (200, 48),
    }


# Adapters

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def _adapters(folder: Path) -> None:
    """Write pairs of LoRA adapters: on linear layers, on a table, with full tensors, and on a packed projection."""
    linear = {n: s for n, s in LLAMA.tensors().items() if n.split(".")[-2] in _TARGETS}
    query = {n: s for n, s in linear.items() if "q_proj" in n}
    table = {"model.embed_tokens.weight": (LLAMA.vocabulary, LLAMA.hidden)}
    packed = {n: s[::-1] for n, s in _gpt2().items() if n.endswith("c_attn.weight")}
    for number, expert in enumerate(EXPERTS[:2]):
        rank = (8, 4)[number]
        _adapter(folder / f"linear-{expert}", linear, 8)
        _adapter(folder / f"ranks-{expert}", linear, rank, use_rslora=bool(number))
        _adapter(folder / f"table-{expert}", query | table, rank)
        full = {"base_model.model.lm_head.weight": INITIAL_RMS * random_tensor(expert, (9001, 64), 0.5)}
        _adapter(folder / f"saved-{expert}", query, rank, full, modules_to_save=["lm_head"])
        _adapter(folder / f"packed-{expert}", packed, rank, fan_in_fan_out=True)


def _adapter(
    folder: Path, shapes: Shapes, rank: int, full: Mapping[str, Tensor] | None = None, **settings: object
) -> None:
    """Write an adapter of the tensors with these shapes (`O x I`; a table `entries x width`)."""
    folder.mkdir(parents=True)
    tensors = dict(full or {})
    for name, (rows, columns) in shapes.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        noise = random_tensor(f"{folder.name}/{name}", (rows + columns, rank), 1.0)
        if "embed" in name:
            tensors[f"{module}.lora_embedding_A"] = noise[:rows].mT.contiguous()
            tensors[f"{module}.lora_embedding_B"] = noise[rows:] * INITIAL_RMS
        else:
            tensors[f"{module}.lora_A.weight"] = noise[rows:].mT.contiguous()
            tensors[f"{module}.lora_B.weight"] = noise[:rows] * INITIAL_RMS
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": sorted({name.split(".")[-2] for name in shapes}),
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
