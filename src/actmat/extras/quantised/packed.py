"""`pack-quantized` of compressed-tensors: integers of 4 or 8 bits in int32 words along rows, with scales per group.

    W[o, i] = (code[o, i] - zero[o, g]) * scale[o, g],  g = i // group size, or g_idx[i]

Stored as `weight_packed`, `weight_scale`, `weight_shape`, and `weight_zero_point` (packed along columns) or
`weight_g_idx` where there are. Codes are stored with an offset of half their range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.checkpoints.codecs.base import WINDOW, Claims, Codec, CodedTensor, Headers, StoredParts
from actmat.errors import CheckpointError
from actmat.extras.quantised.scaled import Grid
from actmat.extras.quantised.settings import COMPRESSED_KEYS
from actmat.extras.quantised.words import group_index, pack_words, unpack_words

WORD_BITS = 32


@dataclass(frozen=True)
class PackedTensor(CodedTensor):
    """Packed integers; `packed`, `scale`, `size`, `zero`, `order`: stored names, empty where there is none."""

    packed: str
    scale: str
    size: str
    bits: int
    grid: Grid
    zero: str = ""
    order: str = ""
    scale_dtype: str = "float32"

    def decode(self, stored: StoredParts, matrix: int, start: int, stop: int) -> Tensor:
        """Codes less zero points, times scales."""
        self._check_size(stored)
        words, offset = self.columns * self.bits // WORD_BITS, 1 << (self.bits - 1)
        first = matrix * self.rows + start
        codes = stored.entries(self.packed, first * words, (stop - start) * words).view(stop - start, words)
        values = unpack_words(codes, self.bits).to(torch.float32)
        order = group_index(stored.entries(self.order, 0, self.columns), self.grid.columns) if self.order else None
        if self.zero:
            values -= self.grid.expand(self._zeros(stored, matrix, start, stop), start, stop, self.columns, order)
        else:
            values -= offset
        low, high = self.grid.blocks(start, stop)
        groups = self.grid.columns
        scales = stored.entries(self.scale, (matrix * self.grid.rows + low) * groups, (high - low) * groups)
        wide = scales.view(high - low, groups).to(torch.float32)
        return values.mul_(self.grid.expand(wide, start, stop, self.columns, order))

    @property
    def granule(self) -> int:
        """Rows whose zero points fill words."""
        if self.order or (self.grid.rows == 1 and self.rows > 1):
            return 0
        step = WORD_BITS // self.bits if self.zero else 1
        return min(self.rows, step * max(1, WINDOW // (step * self.columns)))

    @property
    def why_not_written(self) -> str:
        """Reason why the layout is only read."""
        return "" if self.granule else "packed codes with an order of columns, or one scale, are only read"

    def constants(self) -> Mapping[str, Tensor]:
        """The shape."""
        return {self.size: torch.tensor(self.shape, dtype=torch.int64)} if self.size else {}

    def encode(self, values: Tensor) -> Mapping[str, Tensor]:
        """Scales from the extremes of each group, as compressed-tensors has them; codes are the nearest."""
        rows, groups, offset = len(values), self.grid.columns, 1 << (self.bits - 1)
        split = values.view(rows, groups, -1)
        low, high = split.amin(-1).clamp(max=0), split.amax(-1).clamp(min=0)
        width = high - low if self.zero else 2 * torch.maximum(-low, high)
        scale = (width / (2 * offset - 1)).to(torch_dtype(self.scale_dtype))
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        wide = scale.float()
        zero = (-offset - low / wide).round().clamp(-offset, offset - 1) if self.zero else torch.zeros(rows, groups)
        codes = (split / wide[..., None] + zero[..., None]).round().clamp(-offset, offset - 1) + offset
        parts = {self.packed: pack_words(codes.view(rows, -1).to(torch.uint8), self.bits), self.scale: scale}
        if self.zero:
            per_word = WORD_BITS // self.bits
            filled = torch.nn.functional.pad(zero + offset, (0, 0, 0, -rows % per_word)).to(torch.uint8)
            parts[self.zero] = pack_words(filled.t().contiguous(), self.bits).t()
        return parts

    def part(self, rows: int) -> PackedTensor:
        """A matrix of the first rows."""
        return replace(self, shape=(rows, self.columns), grid=replace(self.grid, rows=rows), size="")

    def _zeros(self, stored: StoredParts, matrix: int, start: int, stop: int) -> Tensor:
        """Unsigned zero points of rows `start:stop`: both they and the codes carry the offset, which cancels."""
        per_word, groups = WORD_BITS // self.bits, self.grid.columns
        height = -(-self.grid.rows // per_word)
        low, high = start // per_word, -(-stop // per_word)
        words = stored.entries(self.zero, (matrix * height + low) * groups, (high - low) * groups)
        codes = unpack_words(words.view(high - low, groups).t(), self.bits)  # groups x rows
        return codes.t()[start - low * per_word : stop - low * per_word].to(torch.float32)

    def _check_size(self, stored: StoredParts) -> None:
        """Refuse a row that ends within a word: `weight_shape` tells, and headers do not."""
        if not self.size:
            return
        said = tuple(stored.entries(self.size, 0, len(self.shape)).tolist())
        if said != self.shape:
            raise CheckpointError(
                f"{stored.inner.location}: tensor '{self.size}' says {list(said)}, and '{self.packed}' holds "
                f"{list(self.shape)}: rows that end within a 32-bit word are not read. Fix: save a dequantised "
                "(bfloat16) copy with compressed-tensors."
            )


def _claims(headers: Headers) -> Claims:
    """Every `NAME_packed` of int32 with its scales."""
    claims = Claims()
    if headers.method not in ("", "compressed-tensors"):
        return claims
    for spec in headers.specs.values():
        name = spec.name.removesuffix("_packed")
        if name == spec.name or spec.dtype != "int32" or len(spec.shape) < 2:
            continue
        found = _tensor(name, spec, headers)
        if isinstance(found, str):
            claims.problems.append(f"tensor '{spec.name}' {list(spec.shape)}: {found}")
        else:
            claims.tensors.append(found)
    return claims


def _tensor(name: str, packed: TensorSpec, headers: Headers) -> PackedTensor | str:
    """The logical tensor `name`, or why it cannot be read."""
    specs = headers.specs
    scale, zero, size, order = (f"{name}_{part}" for part in ("scale", "zero_point", "shape", "g_idx"))
    bits = _bits(headers)
    if bits not in (4, 8):
        return f"integers of {bits or 'unknown'} bits are not read; expected 4 or 8 in config.json"
    if scale not in specs or not specs[scale].is_floating:
        return f"expected scales '{scale}' of floats, found none"
    *batch, rows, words = packed.shape
    columns, (*stack, height, groups) = words * WORD_BITS // bits, specs[scale].shape or (0, 0)
    if stack != batch or height not in (1, rows) or not groups or columns % groups:
        return f"scales '{scale}' {list(specs[scale].shape)} do not divide {columns} columns into equal groups"
    grid = Grid(height, groups, 1 if height > 1 else rows, columns // groups)
    of_zero = (*batch, -(-rows // (WORD_BITS // bits)), groups)
    if zero in specs and (specs[zero].shape, specs[zero].dtype) != (of_zero, "int32"):
        return f"zero points '{zero}' {specs[zero].dtype} {list(specs[zero].shape)} do not fit"
    if size in specs and specs[size].shape != (len(packed.shape),):
        return f"'{size}' {list(specs[size].shape)} does not name the {len(packed.shape)} sizes of a tensor"
    if order in specs and specs[order].shape != (columns,):
        return f"'{order}' {list(specs[order].shape)} does not name one group per column"
    parts = (packed.name, scale, size, zero, order)
    return PackedTensor(
        name=name,
        shape=(*batch, rows, columns),
        dtype=headers.dtype,
        scheme=f"int{bits} packed, one scale {'per row' if groups == 1 else f'per {columns // groups} columns'}"
        + (", zero points" if zero in specs else ""),
        parts=tuple(p for p in parts if p in specs),
        packed=packed.name,
        scale=scale,
        size=size if size in specs else "",
        bits=bits,
        grid=grid,
        zero=zero if zero in specs else "",
        order=order if order in specs else "",
        scale_dtype=specs[scale].dtype,
    )


def _bits(headers: Headers) -> int:
    """Bits per integer that the config declares for all packed weights; 0 where it declares none, or several."""
    groups = headers.settings.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        bits = weights.get("num_bits") if isinstance(weights, dict) else None
        if isinstance(bits, int) and weights is not None and weights.get("type", "int") == "int":
            found.add(bits)
    return found.pop() if len(found) == 1 else 0


PACKED = Codec("packed", _claims, keys={"compressed-tensors": COMPRESSED_KEYS})
