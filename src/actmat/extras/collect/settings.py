"""Settings of `collect`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Labels = Literal["drawn", "given"]
"""Labels for the Fisher: drawn from the model's predictions, or given with the batches."""

LogLikelihood = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
"""`(model, batch of one sample) -> scalar log-likelihood`."""

TokenMask = Callable[[Any], Tensor | None]
"""Batch -> mask `B S`, True for tokens; None: no padding."""

FLOATS = {"float32": torch.float32, "float64": torch.float64}
"""dtypes of products and of stored sums."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement."""

    gram: bool = True  # measure Gram matrices and token counts of embeddings
    fisher: bool = False  # measure the diagonal Fisher, one backward pass per sample
    fisher_labels: Labels = "drawn"  # "drawn" from the model's predictions, or "given" with the batches
    loss: LogLikelihood | None = None  # log-likelihood of one sample, in place of the built-in one
    mask: TokenMask | None = None  # mask of a batch, for models whose calls do not carry one
    compute_dtype: str = "float32"  # dtype of the products, "float32" or "float64"; sums are float64
    dtype: str = "float32"  # dtype of the stored sums, "float32" or "float64"
    share: bool = True  # store one sum for layers that read the same input
    seed: int = 0  # seed of the labels that are drawn
    source: str = "batches"
    only: Collection[str] | None = None  # parameters to measure, by their names in the model; None: all
    sums_on: str | None = None  # device of the float64 sums of Gram matrices; None: the model's
    details: Mapping[str, str] | None = None
