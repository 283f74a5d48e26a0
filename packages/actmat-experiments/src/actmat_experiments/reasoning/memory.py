"""Memory of generation and of statistics, planned before a model is loaded, from its config and the size of its files.

Shapes: `L` layers, `T` tokens of a text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.errors import MergeError

_SHARE = 0.8
"""Share of the memory beside the weights that keys and values may take; the rest is for activations and fragments."""
_LARGEST_BATCH = 64
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30


def cache_bytes(config: Any, tokens: int, dtype: str) -> int:
    """Keys and values of one text of `T` tokens: `2 L H d T` numbers; layers with a window keep that many tokens.

    Args:
        config: of transformers, of a decoder.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    kept = sum(min(tokens, window) if window and kind == "sliding_attention" else tokens for kind in kinds)
    return int(2 * heads * width * kept * _WIDTH[dtype])


def planned_batch(folder: Path, tokens: int, dtype: str, memory: int) -> int:
    """Answers that may be drawn together: a power of two, 64 at most, so that equal machines plan alike.

    Args:
        folder: of the model.
        tokens: of a prompt and its answer.
        memory: bytes of the device.

    Raises:
        MergeError: not even one answer fits.
    """
    from transformers import AutoConfig

    weights = sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".safetensors", ".bin"))
    each = cache_bytes(AutoConfig.from_pretrained(folder), tokens, dtype)
    batch = int(_SHARE * (memory - weights) // each)
    if batch < 1:
        raise MergeError(
            f"One answer of up to {tokens} tokens takes {each / GIB:.1f} GiB beside {weights / GIB:.1f} GiB of "
            f"weights; the device has {memory / GIB:.1f} GiB. Set max_tokens to a smaller number, or use backend=vllm."
        )
    return int(min(_LARGEST_BATCH, 1 << (batch.bit_length() - 1)))


def host_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gram_bytes(width: int) -> int:
    """Bytes of the float64 sum of one Gram matrix, of which blocks on and below the diagonal are kept."""
    from actmat_experiments.core import BLOCK

    return sum(8 * min(BLOCK, width - start) * min(start + BLOCK, width) for start in range(0, width, BLOCK))


def passes_of(shapes: Mapping[str, tuple[int, ...]], most: int) -> list[frozenset[str]]:
    """Weights to measure in each pass over the data, in the order of the model, by layers.

    Layers that read the same input share one sum; counting one for each weight is on the safe side. What comes before
    the first layer, tables of embeddings as a rule, is measured with it, as tables alone have no input to measure.

    Args:
        shapes: of the matrices, `O I`, by name.
        most: bytes of the sums of one pass, at least one layer's.
    """
    layers: dict[str, list[str]] = {}
    before: list[str] = []
    for name in shapes:
        number = next((i for i, part in enumerate(name.split(".")) if part.isdigit()), None)
        if number is None and not layers:
            before.append(name)
            continue
        key = name if number is None else ".".join(name.split(".")[: number + 1])
        layers.setdefault(key, before if not layers else []).append(name)
    passes: list[list[str]] = []
    used = 0
    for names in layers.values():
        size = sum(gram_bytes(shapes[name][-1]) for name in names)
        if not passes or used + size > most:
            passes.append([])
            used = 0
        passes[-1] += names
        used += size
    return [frozenset(some) for some in passes]
