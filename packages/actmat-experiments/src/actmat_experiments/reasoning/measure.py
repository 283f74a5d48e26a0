"""Statistics of an expert for the rules that want data: the inputs of its layers on prompts of its own task.

Padding does not count: the model's attention mask tells it apart. Prompts are of training data, never of a benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from actmat_experiments.harness.progress import quiet

__all__ = ["measure"]


def measure(
    checkpoint: str,
    prompts: Sequence[str],
    out: Path,
    *,
    batch_size: int = 32,
    longest: int = 1024,
    device: str = "cpu",
    dtype: str = "float32",
) -> None:
    """Run an expert on prompts and write the second moments of all its layers' inputs to the folder `out`.

    Args:
        checkpoint: directory or hub id of the expert.
        out: folder to write, as `actmat merge` reads it.
        longest: tokens of a prompt that are looked at.
        dtype: of the model; sums are in float32.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from actmat.statistics import collect

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to(device)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def batches() -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(prompts), batch_size):
            some = list(prompts[start : start + batch_size])
            found = tokenizer(some, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            yield {"input_ids": found.input_ids.to(device), "attention_mask": found.attention_mask.to(device)}

    collect(model, batches(), checkpoint=checkpoint, out=out)
