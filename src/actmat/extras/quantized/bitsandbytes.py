"""bitsandbytes (read only): 4 bits (NF4, FP4) in blocks, and 8 bits with a scale per row.

    4 bits: W[n] = table[code[n]] * absmax[n // block];  two codes per byte, the high half first
            absmax[b] = table2[code2[b]] * absmax2[b // block2] + offset     (where scales are quantized as well)
    8 bits: W[o, i] = code[o, i] * SCB[o] / 127

The shape and the tables of a 4-bit tensor are separate tensors, which are read when the checkpoint is opened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.bounds import parse_json
from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.checkpoints.codecs.base import Codec, CodedTensor, CodeReader, Headers
from actmat.errors import CheckpointError
from actmat.extras.quantized.settings import BITSANDBYTES_KEYS

STATE = ".quant_state.bitsandbytes__"
MOST_STATE_BYTES = 1 << 16
MOST_BLOCK = 1 << 20
WIDE = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class FourBitTensor(CodedTensor):
    """4-bit codes in blocks over the flattened tensor.

    Args:
        table: value of each code.
        block: number of entries that share a scale.
        nested: for quantized scales: their table, entries per block, and offset.
    """

    table: tuple[float, ...]
    block: int
    nested: tuple[tuple[float, ...], int, float] | None

    def decode(self, stored: CodeReader, matrix: int, start: int, stop: int) -> Tensor:
        """Decode to table values times scales."""
        length = self.columns
        low, high = (matrix * self.rows + start) * length, (matrix * self.rows + stop) * length
        first, last = low // 2, -(-high // 2)
        data = stored.entries(self.name, first, last - first)
        codes = torch.stack((data >> 4, data & 15), -1).view(-1)[low - 2 * first : high - 2 * first]
        blocks = torch.arange(low, high) // self.block
        scales = self._scales(stored, low // self.block, -(-high // self.block))
        values = torch.tensor(self.table)[codes.long()] * scales[blocks - low // self.block]
        return values.view(stop - start, length)

    def _scales(self, stored: CodeReader, low: int, high: int) -> Tensor:
        codes = stored.entries(f"{self.name}.absmax", low, high - low)
        if self.nested is None:
            return codes.to(torch.float32)
        table, block, offset = self.nested
        first = low // block
        outer = stored.entries(f"{self.name}.nested_absmax", first, -(-high // block) - first).to(torch.float32)
        return torch.tensor(table)[codes.long()] * outer[torch.arange(low, high) // block - first] + offset


@dataclass(frozen=True)
class RowTensor(CodedTensor):
    """8-bit codes with the maximum magnitude per row; `parts`: codes, magnitudes, optionally the format."""

    def decode(self, stored: CodeReader, matrix: int, start: int, stop: int) -> Tensor:
        """Decode to codes times 1/127 of the row's maximum magnitude."""
        codes = stored.entries(self.name, start * self.columns, (stop - start) * self.columns)
        largest = stored.entries(self.parts[1], start, stop - start).to(torch.float32)
        return codes.view(stop - start, self.columns).to(torch.float32) * largest[:, None] * (1 / 127)


def _find(spec: TensorSpec, headers: Headers) -> CodedTensor | str | None:
    """Recognize a weight with a `quant_state` (4 bits) or an `SCB` (8 bits)."""
    stem = spec.name.removesuffix(".weight")
    states = (f"{spec.name}{STATE}{code}" for code in ("nf4", "fp4"))
    if spec.dtype == "uint8" and (state := next((n for n in states if n in headers.specs), "")):
        try:
            return _four_bit(spec, state, headers)
        except (CheckpointError, ValueError, TypeError, KeyError) as error:
            return f"its state '{state}' is damaged: {type(error).__name__}: {str(error)[:200]}"
    largest = headers.specs.get(f"{stem}.SCB") if spec.dtype == "int8" else None
    return None if largest is None else _eight_bit(spec, stem, largest, headers)


def _eight_bit(spec: TensorSpec, stem: str, largest: TensorSpec, headers: Headers) -> RowTensor | str:
    if len(spec.shape) != 2 or not spec.numel or not largest.is_floating or largest.numel != spec.shape[0]:
        return f"expected a matrix and one SCB per row, found {list(spec.shape)} and {list(largest.shape)}"
    layout = headers.specs.get(f"{stem}.weight_format")
    if layout is not None and (layout.numel != 1 or int(headers.read(layout.name).item()) != 0):
        return "its rows are in the order of a GPU kernel (weight_format); expected 0, row by row"
    parts = tuple(n for n in (spec.name, largest.name, f"{stem}.weight_format") if n in headers.specs)
    words = "int8 of bitsandbytes, one scale per row"
    return RowTensor(spec.name, spec.shape, headers.dtype, words, parts)


def _four_bit(spec: TensorSpec, state_name: str, headers: Headers) -> FourBitTensor | str:
    """The logical tensor of 4-bit codes, from its state; errors of a damaged state propagate."""
    specs, name = headers.specs, spec.name
    if specs[state_name].numel > MOST_STATE_BYTES or specs[state_name].dtype != "uint8":
        return "its state is not a short text"
    state: dict[str, Any] = parse_json(bytes(headers.read(state_name).tolist()))
    shape = tuple(_size(n) for n in state["shape"])
    block, dtype = _size(state["blocksize"]), str(state["dtype"]).removeprefix("torch.")
    blocks = -(-math.prod(shape) // block)
    absmax = specs[f"{name}.absmax"]
    if dtype not in WIDE or not shape or not math.prod(shape) or -(-math.prod(shape) // 2) != spec.numel:
        return f"its state says {dtype} {list(shape)}, which does not match {spec.numel} bytes of codes"
    if block > MOST_BLOCK or absmax.numel != blocks:
        return f"expected {blocks} scales, found {absmax.numel}"
    nested = None
    if absmax.dtype == "uint8":
        outer, size = specs[f"{name}.nested_absmax"], _size(state["nested_blocksize"])
        if size > MOST_BLOCK or outer.numel != -(-blocks // size):
            return f"expected {-(-blocks // size)} scales of scales, found {outer.numel}"
        nested = _table(f"{name}.nested_quant_map", 256, headers), size, float(state["nested_offset"])
    extra = ("quant_map", "absmax", "nested_absmax", "nested_quant_map")
    return FourBitTensor(
        name=name,
        shape=shape,
        dtype=dtype,
        scheme=f"{state_name[-3:].upper()} of bitsandbytes, one scale per {block} entries"
        + (", scales quantized" if nested else ""),
        parts=(name, *(n for e in extra if (n := f"{name}.{e}") in specs), state_name),
        table=_table(f"{name}.quant_map", 16, headers),
        block=block,
        nested=nested,
    )


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 40:
        raise ValueError(f"expected a size, found {str(value)[:40]}")
    return value


def _table(name: str, size: int, headers: Headers) -> tuple[float, ...]:
    spec = headers.specs[name]
    if spec.numel != size or not spec.is_floating or not torch_dtype(spec.dtype).is_floating_point:
        raise ValueError(f"expected {size} values in '{name}', found {spec.numel}")
    return tuple(headers.read(name).to(torch.float32).tolist())


BITSANDBYTES = Codec("bitsandbytes", ("bitsandbytes",), _find, keys={"bitsandbytes": BITSANDBYTES_KEYS})
