"""Extract an adapter from a fine-tuned model."""

from __future__ import annotations

from pathlib import Path

from actmat.extracting import ExtractReport, ExtractSettings, extract_adapter

__all__ = ["ExtractReport", "extract"]


def extract(
    base: str | Path,
    model: str | Path,
    *,
    out: str | Path,
    rank: int | None = None,
    energy: float | None = None,
    others: str = "save",
    dtype: str | None = None,
    threads: int | None = None,
) -> ExtractReport:
    """Write the best low-rank approximation of `W - W_0` as a LoRA adapter for PEFT, layer by layer.

    Args:
        base: directory, file, hub id or URL of the checkpoint `W_0`.
        model: likewise, of what was fine-tuned from it: a full checkpoint, or an adapter of any family.
        out: directory to write; must not exist, or be empty.
        rank: of every layer.
        energy: instead of a rank, the share of each layer's squared norm to keep, such as 0.99.
        others: changed tensors that LoRA cannot hold (norms, tables, convolutions, biases) are kept whole in the
            adapter (`save`), or left out (`leave`).
        dtype: of the adapter: float64, float32, bfloat16 or float16; default: the base's, tensor by tensor.
        threads: layers at the same time; default: all cores.

    Returns:
        The report, with the error of every layer in `record["tensors"]`.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    settings = ExtractSettings(rank, energy, others, dtype, threads)
    return extract_adapter(str(base), str(model), Path(out), settings)
