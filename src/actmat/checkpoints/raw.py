"""Tensors as bytes: views of a tensor's memory, and copies of ranges of it.

Bytes are little-endian in files and in memory; the header parser refuses to run on a big-endian machine.
"""

from __future__ import annotations

import ctypes
import math

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


def copy_range(tensor: Tensor, start: int, out: memoryview) -> None:
    """Copy the row-major bytes `start : start + len(out)` of a CPU tensor of any strides into `out`.

    Of a tensor whose memory is in another order, or lazily negated, the entries in that range are copied first.
    """
    length = len(out)
    if length == 0:
        return
    if not tensor.is_contiguous() or tensor.is_neg():
        first, last = start // tensor.itemsize, -(-(start + length) // tensor.itemsize)
        start -= first * tensor.itemsize
        entries = torch.empty(last - first, dtype=tensor.dtype)
        _copy_entries(tensor, first, entries)
        tensor = entries
    out[:] = raw_bytes(tensor)[start : start + length]


def _copy_entries(tensor: Tensor, first: int, out: Tensor) -> None:
    """Fill `out` with consecutive entries in row-major order, from entry `first` on; no other entry is copied."""
    count = out.numel()
    if tensor.ndim <= 1:
        out.copy_(tensor.reshape(-1)[first : first + count])
        return
    row = math.prod(tensor.shape[1:])
    index, inside = divmod(first, row)
    if inside or count < row:  # the end of a row, or a run inside one; what follows begins with a row
        head = min(count, row - inside)
        _copy_entries(tensor[index], inside, out[:head])
        if head < count:
            _copy_entries(tensor, first + head, out[head:])
        return
    rows = count // row
    out[: rows * row].view(rows, *tensor.shape[1:]).copy_(tensor[index : index + rows])
    if rows * row < count:
        _copy_entries(tensor[index + rows], 0, out[rows * row :])
