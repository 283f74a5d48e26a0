"""`pack-quantized` of compressed-tensors: integers of 4 or 8 bits in int32 words along rows, with scales per group.

    W[o, i] = (code[o, i] - zero[o, g]) * scale[o, g],  g = i // group size, or g_idx[i]

Stored as `weight_packed`, `weight_scale`, `weight_shape`, and `weight_zero_point` (packed along columns) or
`weight_g_idx` if present. Codes are stored with an offset of half their range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.codecs.base import Codec, CodeReader, Headers
from actmat.errors import CheckpointError
from actmat.extras.quantized.scaled import Grid, GridTensor
from actmat.extras.quantized.settings import COMPRESSED_KEYS
from actmat.extras.quantized.words import unpack_words

WORD_BITS = 32


@dataclass(frozen=True)
class PackedTensor(GridTensor):
    """Packed integers; the shape, if stored, is named `NAME_shape`."""

    bits: int = 4

    def decode(self, stored: CodeReader, matrix: int, start: int, stop: int) -> Tensor:
        """Decode to codes minus zero points, times scales."""
        self._check_size(stored)
        words, offset = self.columns * self.bits // WORD_BITS, 1 << (self.bits - 1)
        first = matrix * self.rows + start
        codes = stored.entries(self.parts[0], first * words, (stop - start) * words).view(stop - start, words)
        values, order = unpack_words(codes, self.bits).to(torch.float32), self.column_blocks(stored)
        if self.zero:
            values -= self.grid.expand(self._zeros(stored, matrix, start, stop), start, stop, self.columns, order)
        else:
            values -= offset
        return values.mul_(self.of_grid(stored, self.parts[1], matrix, start, stop, order))

    @property
    def size(self) -> str:
        """Stored name of the shape; may be empty."""
        return self.stored_as(f"{self.name}_shape")

    def _zeros(self, stored: CodeReader, matrix: int, start: int, stop: int) -> Tensor:
        """Unsigned zero points of rows `start:stop`; their offset cancels that of the codes."""
        per_word, groups = WORD_BITS // self.bits, self.grid.columns
        height = -(-self.grid.rows // per_word)
        low, high = start // per_word, -(-stop // per_word)
        words = stored.entries(self.zero, (matrix * height + low) * groups, (high - low) * groups)
        codes = unpack_words(words.view(high - low, groups).t(), self.bits)  # groups x rows
        return codes.t()[start - low * per_word : stop - low * per_word].to(torch.float32)

    def _check_size(self, stored: CodeReader) -> None:
        """Raise if rows end within a word, which only the content of `weight_shape` shows."""
        if not self.size:
            return
        said = tuple(stored.entries(self.size, 0, len(self.shape)).tolist())
        if said != self.shape:
            raise CheckpointError(
                f"{stored.inner.location}: tensor '{self.size}' says {list(said)}, and '{self.parts[0]}' holds "
                f"{list(self.shape)}: rows that end within a 32-bit word are not supported. Fix: save a dequantized "
                "(bfloat16) copy with compressed-tensors."
            )


def _find(packed: TensorSpec, headers: Headers) -> PackedTensor | str | None:
    """Recognize a `NAME_packed` of int32 with its scales."""
    name, specs = packed.name.removesuffix("_packed"), headers.specs
    if name == packed.name or packed.dtype != "int32" or len(packed.shape) < 2:
        return None
    scale, zero, size, order = (f"{name}_{part}" for part in ("scale", "zero_point", "shape", "g_idx"))
    bits = _bits(headers)
    if bits not in (4, 8):
        return f"integers of {bits or 'unknown'} bits are not supported; expected 4 or 8 in config.json"
    if scale not in specs or not specs[scale].is_floating:
        return f"the float scales '{scale}' are missing"
    *batch, rows, words = packed.shape
    columns, (*stack, height, groups) = words * WORD_BITS // bits, specs[scale].shape or (0, 0)
    if stack != batch or height not in (1, rows) or not groups or columns % groups:
        return f"scales '{scale}' {list(specs[scale].shape)} do not divide {columns} columns into equal groups"
    of_zero = (*batch, -(-rows // (WORD_BITS // bits)), groups)
    for other, shape in ((zero, of_zero), (size, (len(packed.shape),)), (order, (columns,))):
        if other in specs and specs[other].shape != shape:
            return f"'{other}' {list(specs[other].shape)} has the wrong shape; expected {list(shape)}"
    if zero in specs and specs[zero].dtype != "int32":
        return f"'{zero}' is {specs[zero].dtype}; expected int32"
    return PackedTensor(
        name=name,
        shape=(*batch, rows, columns),
        dtype=headers.dtype,
        scheme=f"int{bits} packed, one scale {'per row' if groups == 1 else f'per {columns // groups} columns'}"
        + (", zero points" if zero in specs else ""),
        parts=(packed.name, scale, *(p for p in (size, zero, order) if p in specs)),
        grid=Grid(height, groups, 1 if height > 1 else rows, columns // groups),
        bits=bits,
    )


def _bits(headers: Headers) -> int:
    """Bits per integer declared in the config for all packed weights; 0 if missing or not unique."""
    groups = headers.settings.get("config_groups")
    sizes = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        bits = weights.get("num_bits") if isinstance(weights, dict) else None
        if isinstance(bits, int) and weights is not None and weights.get("type", "int") == "int":
            sizes.add(bits)
    return sizes.pop() if len(sizes) == 1 else 0


PACKED = Codec("packed", ("", "compressed-tensors"), _find, keys={"compressed-tensors": COMPRESSED_KEYS})
