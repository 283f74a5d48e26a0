"""Shapes of published models, as checkpoints that have headers only: enough for a plan.

    python -m benchmarks.model_shapes      # prints their tensors and parameters

The numbers are those of the models' public `config.json`:

* Llama-3.1-8B, 70B and 405B: `meta-llama/Llama-3.1-8B`, `-70B`, `-405B` (the 8 key-value heads of the release of
  September 2024);
* Mixtral-8x22B: `mistral-community/Mixtral-8x22B-v0.1`, every expert's matrix a tensor, as it is stored;
* DeepSeek-V3: `deepseek-ai/DeepSeek-V3`, the same as the defaults of `transformers.DeepseekV3Config`; without the layer
  of multi-token prediction, and in bfloat16, where the release is in float8.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, FileIdentity, TensorSpec

Shapes = dict[str, tuple[int, ...]]

LLAMA = {
    "llama-3.1-8b": {"hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "llama-3.1-70b": {"hidden": 8192, "intermediate": 28672, "layers": 80, "heads": 64, "kv_heads": 8, "vocab": 128256},
    "llama-3.1-405b": {
        "hidden": 16384, "intermediate": 53248, "layers": 126, "heads": 128, "kv_heads": 8, "vocab": 128256,
    },
}  # fmt: skip
MIXTRAL = {"hidden": 6144, "intermediate": 16384, "layers": 56, "heads": 48, "kv_heads": 8, "vocab": 32000}
MIXTRAL_EXPERTS = 8
DEEPSEEK = {
    "hidden": 7168, "intermediate": 18432, "expert": 2048, "layers": 61, "dense_layers": 3, "experts": 256,
    "heads": 128, "q_rank": 1536, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128, "vocab": 129280,
}  # fmt: skip


def shapes_of(model: str) -> Shapes:
    """Name -> shape of every tensor of a model."""
    if model in LLAMA:
        return _llama(**LLAMA[model])
    return {"mixtral-8x22b": _mixtral, "deepseek-v3": _deepseek}[model]()


MODELS = (*LLAMA, "mixtral-8x22b", "deepseek-v3")


def _frame(hidden: int, vocab: int) -> Shapes:
    return {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,),
            "lm_head.weight": (vocab, hidden)}  # fmt: skip


def _attention(stem: str, hidden: int, heads: int, kv_heads: int) -> Shapes:
    head = hidden // heads
    rows = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head}
    found: Shapes = {f"{stem}self_attn.{n}_proj.weight": (size, hidden) for n, size in rows.items()}
    return found | {f"{stem}self_attn.o_proj.weight": (hidden, heads * head)}


def _norms(stem: str, hidden: int) -> Shapes:
    return dict.fromkeys((f"{stem}input_layernorm.weight", f"{stem}post_attention_layernorm.weight"), (hidden,))


def _mlp(
    stem: str, hidden: int, inner: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    gate, up, down = (f"{stem}{n}.weight" for n in names)
    return {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> Shapes:
    found = _frame(hidden, vocab)
    for k in range(layers):
        stem = f"model.layers.{k}."
        found |= _attention(stem, hidden, heads, kv_heads) | _norms(stem, hidden)
        found |= _mlp(f"{stem}mlp.", hidden, intermediate)
    return found


def _mixtral() -> Shapes:
    hidden, inner = MIXTRAL["hidden"], MIXTRAL["intermediate"]
    found = _frame(hidden, MIXTRAL["vocab"])
    for k in range(MIXTRAL["layers"]):
        stem = f"model.layers.{k}."
        found |= _attention(stem, hidden, MIXTRAL["heads"], MIXTRAL["kv_heads"]) | _norms(stem, hidden)
        found[f"{stem}block_sparse_moe.gate.weight"] = (MIXTRAL_EXPERTS, hidden)
        for e in range(MIXTRAL_EXPERTS):
            found |= _mlp(f"{stem}block_sparse_moe.experts.{e}.", hidden, inner, ("w1", "w3", "w2"))
    return found


def _deepseek() -> Shapes:
    d = DEEPSEEK
    hidden, heads = d["hidden"], d["heads"]
    found = _frame(hidden, d["vocab"])
    for k in range(d["layers"]):
        stem = f"model.layers.{k}."
        found |= _norms(stem, hidden) | {
            f"{stem}self_attn.q_a_proj.weight": (d["q_rank"], hidden),
            f"{stem}self_attn.q_a_layernorm.weight": (d["q_rank"],),
            f"{stem}self_attn.q_b_proj.weight": (heads * (d["nope"] + d["rope"]), d["q_rank"]),
            f"{stem}self_attn.kv_a_proj_with_mqa.weight": (d["kv_rank"] + d["rope"], hidden),
            f"{stem}self_attn.kv_a_layernorm.weight": (d["kv_rank"],),
            f"{stem}self_attn.kv_b_proj.weight": (heads * (d["nope"] + d["value"]), d["kv_rank"]),
            f"{stem}self_attn.o_proj.weight": (hidden, heads * d["value"]),
        }
        if k < d["dense_layers"]:
            found |= _mlp(f"{stem}mlp.", hidden, d["intermediate"])
            continue
        found[f"{stem}mlp.gate.weight"] = (d["experts"], hidden)
        for e in range(d["experts"]):
            found |= _mlp(f"{stem}mlp.experts.{e}.", hidden, d["expert"])
        found |= _mlp(f"{stem}mlp.shared_experts.", hidden, d["expert"])
    return found


class HeadersOnly(Checkpoint):
    """A checkpoint in bfloat16 that can be planned with, and not read."""

    def __init__(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.location, self.directory = name, None
        self.specs = MappingProxyType({n: TensorSpec(n, s, "bfloat16", "headers") for n, s in shapes.items()})
        self.aliases = MappingProxyType({})

    @property
    def config(self) -> Mapping[str, Any] | None:
        """None: roles follow from names and shapes."""
        return None

    def identity(self) -> tuple[FileIdentity, ...]:
        """One file of the size of all tensors."""
        return (FileIdentity("headers", sum(s.nbytes for s in self.specs.values())),)

    def read(self, name: str) -> Tensor:
        """Raises ValueError."""
        raise ValueError(f"{self.location} has no data")

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Raises ValueError."""
        raise ValueError(f"{self.location} has no data")

    def close(self) -> None:
        """Nothing is open."""


def parameters(shapes: Shapes) -> int:
    """Number of entries of all tensors."""
    return sum(math.prod(s) for s in shapes.values())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for model in MODELS:
        shapes = shapes_of(model)
        print(f"{model:16} {len(shapes):6} tensors {parameters(shapes) / 1e9:8.2f} B parameters")


if __name__ == "__main__":
    main()
