"""Batches: calling a model with one, its tensors by name, and the hash of everything that a model was called with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.raw import raw_bytes
from actmat.errors import StatisticsError

Batch = Mapping[str, Tensor] | tuple[Tensor, ...] | list[Tensor] | Tensor
"""Keyword arguments of a model, its positional ones, or the only one."""


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Output of the model for a batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch) if isinstance(batch, Tensor) else model(*batch)


def named_tensors(batch: Batch) -> dict[str, Tensor]:
    """Tensors of a batch; positional ones are named by their position."""
    if not isinstance(batch, Mapping):
        batch = {str(i): v for i, v in enumerate([batch] if isinstance(batch, Tensor) else batch)}
    return {k: v for k, v in batch.items() if isinstance(v, Tensor)}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the duration."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


class DataSeen:
    """Samples and tokens of all batches so far, a flag if all are images, and the hash of names, shapes and values."""

    def __init__(self) -> None:
        self.samples = 0
        self.tokens = 0
        self.of_images = True
        self._hash = ContentHash()

    def add(self, batch: Batch) -> None:
        """Count and hash a batch."""
        tensors = named_tensors(batch)
        if not tensors:
            raise StatisticsError("A batch holds no tensors.")
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().resolve_neg().contiguous()
            self._hash.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            if tensor.numel():
                self._hash.update(raw_bytes(tensor if tensor.dtype != torch.bool else tensor.to(torch.uint8)))
        samples = next(iter(tensors.values())).shape[0]
        self.samples += samples
        mask, ids = tensors.get("attention_mask"), tensors.get("input_ids")
        self.of_images &= "pixel_values" in tensors and ids is None
        if mask is not None and mask.ndim == 2:
            self.tokens += int(mask.bool().sum())
        else:
            self.tokens += ids.numel() if ids is not None else samples

    def fingerprint(self) -> str:
        """Hash of all batches."""
        return self._hash.hexdigest()
