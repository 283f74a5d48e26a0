"""Write GGUF files of a tiny Llama by the package gguf."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFWriter

HEADS, KV_HEADS, WIDTH, INNER, LAYERS, VOCAB = 4, 2, 64, 96, 2, 80
METADATA: dict[str, Any] = {
    "block_count": LAYERS, "context_length": 128, "embedding_length": WIDTH, "feed_forward_length": INNER,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.key_length": WIDTH // HEADS,
    "rope.dimension_count": WIDTH // HEADS, "vocab_size": VOCAB,
}  # fmt: skip


def writer_of(file: Path, architecture: str = "llama") -> GGUFWriter:
    """A writer with the metadata of the tiny model."""
    from gguf import GGUFWriter

    writer = GGUFWriter(file, architecture)
    for key, value in METADATA.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    return writer


def written(writer: GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
