"""Tensors as bytes: views of a tensor's memory, and copies of ranges of it.

Bytes are little-endian in files and in memory; the header parser refuses to run on a big-endian machine.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, without a copy; the view keeps the tensor alive.

    Raises:
        ValueError: on another device, not contiguous, or lazily negated.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous CPU tensor, found strides {tensor.stride()} on {tensor.device}")
    if tensor.is_neg():
        raise ValueError("expected a tensor without lazy negation (resolve_neg), found a lazily negated one")
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # the view must keep a temporary alive
    return memoryview(memory).cast("B")


WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an entry -> an integer type of this size, which all functions of torch know."""


def copy_range(tensor: Tensor, start: int, out: memoryview) -> None:
    """Copy the row-major bytes `start : start + len(out)` of a CPU tensor of any strides into `out`.

    Of a tensor whose memory is in another order the entries in that range are copied first; of a negated one, all.
    """
    length = len(out)
    if length == 0:
        return
    if not tensor.is_contiguous() or tensor.is_neg():
        first, last = start // tensor.itemsize, -(-(start + length) // tensor.itemsize)
        start -= first * tensor.itemsize
        tensor = tensor.resolve_neg().view(WHOLE[tensor.itemsize]).take(torch.arange(first, last))
    out[:] = raw_bytes(tensor)[start : start + length]
