"""Pack and unpack codes of less than a byte."""

from __future__ import annotations

import torch
from torch import Tensor


def nibbles(packed: Tensor) -> Tensor:
    """Unpack bytes `[..., n]` to 4-bit codes `[..., 2 n]`, the low half of each byte first; uint8.

    >>> nibbles(torch.tensor([0x21, 0x43], dtype=torch.uint8)).tolist()
    [1, 2, 3, 4]
    """
    data = packed.view(torch.uint8)
    return torch.stack((data & 15, data >> 4), dim=-1).view(*data.shape[:-1], 2 * data.shape[-1])


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words `[..., n]` to codes of 2, 4 or 8 bits `[..., n * 32 / bits]`, lowest bits first; uint8.

    >>> unpack_words(torch.tensor([0x76543210], dtype=torch.int32), 4).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    data = words.reshape(-1).contiguous().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 8:
        return data
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    split = (data.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return split.view(*data.shape[:-1], data.shape[-1] * (8 // bits))


def group_index(order: Tensor, groups: int) -> Tensor:
    """Group of each column, as an index tensor.

    Raises:
        IndexError: a group number is out of range.
    """
    if order.numel() and not 0 <= int(order.min()) <= int(order.max()) < groups:
        raise IndexError(f"expected groups 0 to {groups - 1}, found {int(order.min())} to {int(order.max())}")
    return order.long()
