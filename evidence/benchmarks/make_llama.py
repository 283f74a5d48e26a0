"""Make a Llama-style checkpoint of random numbers, and experts that differ from it a little.

    python -m benchmarks.make_llama work/llama-1b                        # 1.10 B parameters, bfloat16
    python -m benchmarks.make_llama work/llama-03b --hidden 1024 --intermediate 2816 --layers 18

writes `base`, `expert-0`, `expert-1`, ... under the folder: sharded safetensors, `config.json` and a word-level
tokenizer, complete enough for `transformers` and `mergekit`. One tensor is in memory at a time. Every entry depends
on the seed, the tensor's name and the checkpoint alone, so a checkpoint can be made again byte for byte.

An expert is `W_t = W_0 + change * rms(W_0) * noise`. The default change of 1e-2 is above the half ulp of bfloat16
(2^-9 = 2e-3 relative), so that the deltas survive the rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {"bfloat16": (torch.bfloat16, "BF16"), "float32": (torch.float32, "F32")}
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


def noise(name: str, shape: tuple[int, ...], seed: int, device: str = "cpu") -> Tensor:
    """Standard normal entries that depend on the name, the seed and the kind of device alone."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.randn(shape, generator=generator, device=device)


def values(name: str, shape: tuple[int, ...], expert: int | None, change: float, seed: int, device: str) -> Tensor:
    """Tensor `name` of the base (`expert` is None) or of an expert, in float32."""
    is_norm = len(shape) == 1
    base = torch.ones(shape, device=device) if is_norm else noise(name, shape, seed, device).mul_(INITIAL_RMS)
    if expert is None:
        return base
    rms = 1.0 if is_norm else INITIAL_RMS
    return base.add_(noise(f"expert-{expert}/{name}", shape, seed, device), alpha=change * rms)


def shards(shapes: dict[str, tuple[int, ...]], itemsize: int, limit: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Split the tensors, in order, into files of at most `limit` bytes (a larger tensor has a file of its own)."""
    shard: dict[str, tuple[int, ...]] = {}
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if shard and filled + size > limit:
            yield shard
            shard, filled = {}, 0
        shard[name] = shape
        filled += size
    yield shard


def shard_files(folder: Path, shapes: dict[str, tuple[int, ...]], itemsize: int, limit: int) -> dict[str, dict]:
    """File name -> shapes of its tensors, see `shards`; writes the index where there are several files."""
    parts = list(shards(shapes, itemsize, limit))
    files = {f"model-{n:05d}-of-{len(parts):05d}.safetensors": part for n, part in enumerate(parts, start=1)}
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    total = itemsize * sum(map(math.prod, shapes.values()))
    index = {tensor: file for file, part in files.items() for tensor in part}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)
    return files


def write_checkpoint(
    folder: Path,
    size: Size,
    *,
    expert: int | None = None,
    change: float = 1e-2,
    dtype: str = "bfloat16",
    shard_bytes: int = 1 << 30,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Write one checkpoint: weights, index where there are several shards, config and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, code = DTYPES[dtype]
    for name, part in shard_files(folder, size.tensors(), kind.itemsize, shard_bytes).items():
        write_shard(folder / name, part, code, kind, lambda n, s: values(n, s, expert, change, seed, device))
    (folder / "config.json").write_text(json.dumps(size.config(dtype), indent=1))
    write_tokenizer(folder, size.vocabulary)


def write_headers(folder: Path, size: Size) -> Path:
    """A checkpoint in bfloat16 that has headers and a config, for plans of models that no disk here holds."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "model.safetensors", size.tensors(), "BF16", torch.bfloat16, None)
    (folder / "config.json").write_text(json.dumps(size.config("bfloat16")))
    return folder


def write_shard(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    code: str,
    kind: torch.dtype,
    make: Callable[[str, tuple[int, ...]], Tensor] | None,
) -> None:
    """One file of weights; without `make` a hole of the disk where they would be."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (0 if make else offset))
        for name, shape in shapes.items():
            if make is None:
                break
            tensor = make(name, shape).to(kind).cpu()
            file.write(memoryview(tensor.flatten().view(torch.uint8).numpy()))


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


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the model, shared by the programs that make one."""
    for name in ("hidden", "intermediate", "layers", "heads", "key_value_heads", "vocabulary"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Size(), name))


def size_from(arguments: argparse.Namespace) -> Size:
    """The `Size` of parsed `add_size_arguments`."""
    return Size(**{name: getattr(arguments, name) for name in Size.__dataclass_fields__})


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--change", type=float, default=1e-2, help="size of a delta relative to the weights")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--shard-bytes", type=int, default=1 << 30)
    parser.add_argument("--seed", type=int, default=0)
    add_size_arguments(parser)
    given = parser.parse_args()
    size = size_from(given)
    how = {"change": given.change, "dtype": given.dtype, "shard_bytes": given.shard_bytes, "seed": given.seed}
    base, experts = make_family(given.folder, size, given.experts, **how)
    print(f"{size.parameters() / 1e9:.3f} B parameters, {given.dtype}")
    for path in (base, *experts):
        print(path)


if __name__ == "__main__":
    main()
