"""Codes of 8 bits with scales on a grid: `W[o, i] = (code[o, i] - zero[r, c]) * scale[r, c]` in block `r, c`.

| stored next to the codes `NAME` | written by |
|---|---|
| `NAME_scale_inv`, one per block, 128 x 128 by default, the last ones smaller | DeepSeek-V3, transformers' fp8 |
| `STEM.scale_weight`, one | single files `fp8_scaled` of image tools |
| `NAME_scale`, one, one per row, per group of columns or per block; `NAME_zero_point` | compressed-tensors |

The scale multiplies, also where its name says `inv`. Products are formed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.checkpoints.codecs.base import WINDOW, Claims, Codec, CodedTensor, Headers, StoredParts, count
from actmat.extras.quantised.settings import COMPRESSED_KEYS, FP8_KEYS
from actmat.extras.quantised.words import group_index

METHODS = ("", "fp8", "compressed-tensors")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
BLOCK = (128, 128)
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.5}
"""Magnitude of codes that the largest entry of a block is put on; for int8 the middle of 127 and 128, as
compressed-tensors has it."""

ACTIVATIONS = ("input_scale", "scale_input", "activation_scale", "input_zero_point", "output_scale",
               "k_scale", "v_scale", "q_scale", "input_global_scale")  # fmt: skip
"""Last parts of names of scales that belong to activations and caches, which no weight needs."""

MARKERS = ("scaled_fp8",)
"""Tensors without a meaning of their own that single files carry."""


@dataclass(frozen=True)
class Grid:
    """Blocks of a matrix that share a scale.

    Args:
        rows, columns: number of blocks in a column, and in a row, of the grid.
        height, width: of a block, in entries; the last ones may be smaller.
    """

    rows: int
    columns: int
    height: int
    width: int

    def expand(self, values: Tensor, start: int, stop: int, length: int, order: Tensor | None = None) -> Tensor:
        """Values of the grid's rows that meet matrix rows `start:stop`, one per entry: `[stop - start, 1 or I]`.

        Args:
            values: `[blocks, columns]`, from the block of row `start` on.
            length: `I`.
            order: block of each column, where columns are not in order (`g_idx`).
        """
        if self.rows > 1:
            values = values[torch.arange(start, stop) // self.height - start // self.height]
        if order is not None:
            return values[:, order]
        return values.repeat_interleave(self.width, 1)[:, :length] if self.columns > 1 else values

    def blocks(self, start: int, stop: int) -> tuple[int, int]:
        """First and last + 1 row of the grid that matrix rows `start:stop` meet."""
        return (start // self.height, -(-stop // self.height)) if self.rows > 1 else (0, 1)


@dataclass(frozen=True)
class ScaledTensor(CodedTensor):
    """8-bit codes with a grid of scales per matrix; `scale`, `zero`, `order`: stored names, empty if there is none."""

    codes: str
    scale: str
    grid: Grid
    zero: str = ""
    order: str = ""
    per_tensor: bool = False
    codes_dtype: str = ""
    scale_dtype: str = "float32"

    def decode(self, stored: StoredParts, matrix: int, start: int, stop: int) -> Tensor:
        """Codes times scales."""
        first, length = matrix * self.rows + start, self.columns
        codes = stored.entries(self.codes, first * length, (stop - start) * length)
        values = codes.view(stop - start, length).to(torch.float32)
        order = group_index(stored.entries(self.order, 0, length), self.grid.columns) if self.order else None
        if self.zero:
            values -= self._of_grid(stored, self.zero, matrix, start, stop, order)
        return values.mul_(self._of_grid(stored, self.scale, matrix, start, stop, order))

    @property
    def granule(self) -> int:
        """Whole blocks; the whole tensor where it has one scale."""
        if self.zero or self.order or self.codes_dtype not in LARGEST:
            return 0
        if self.per_tensor:
            return count(self.shape) // self.columns
        if self.grid.rows == 1:
            return self.rows
        return min(self.rows, self.grid.height * max(1, WINDOW // (self.grid.height * self.columns)))

    @property
    def why_not_written(self) -> str:
        """Reason why the layout is only read."""
        return "" if self.granule else "codes with zero points or an order of columns are only read"

    def encode(self, values: Tensor) -> Mapping[str, Tensor]:
        """The scale of a block is its largest magnitude over that of the codes; codes are the nearest."""
        grid, rows = self.part(len(values)).grid, len(values)
        padded = torch.nn.functional.pad(
            values.abs(), (0, grid.columns * grid.width - self.columns, 0, grid.rows * grid.height - rows)
        )
        largest = padded.view(grid.rows, grid.height, grid.columns, grid.width).amax((1, 3))
        scale = (largest / LARGEST[self.codes_dtype]).to(torch_dtype(self.scale_dtype))
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        codes = values / grid.expand(scale.float(), 0, rows, self.columns)
        if self.codes_dtype == "int8":
            codes = codes.round().clamp(-128, 127).to(torch.int8)
        else:
            most = LARGEST[self.codes_dtype]
            codes = codes.clamp(-most, most).to(torch_dtype(self.codes_dtype))
        return {self.codes: codes, self.scale: scale}

    def part(self, rows: int) -> ScaledTensor:
        """A matrix of the first blocks."""
        grid = self.grid
        few = replace(grid, rows=-(-rows // grid.height)) if grid.rows > 1 else replace(grid, height=rows)
        return replace(self, shape=(rows, self.columns), grid=few)

    def _of_grid(
        self, stored: StoredParts, name: str, matrix: int, start: int, stop: int, order: Tensor | None
    ) -> Tensor:
        grid = self.grid
        low, high = grid.blocks(start, stop)
        first = 0 if self.per_tensor else (matrix * grid.rows + low) * grid.columns
        values = stored.entries(name, first, (high - low) * grid.columns)
        return grid.expand(values.view(high - low, grid.columns).to(torch.float32), start, stop, self.columns, order)


def grid_of(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> Grid | None:
    """The grid on matrices of a shape, from the shape of their scales; None where they do not fit together.

    >>> grid_of((300, 200), (3, 2), None)
    Grid(rows=3, columns=2, height=128, width=128)
    >>> grid_of((300, 200), (300, 1), None)
    Grid(rows=300, columns=1, height=1, width=200)

    Args:
        block: of the config; by default 128 x 128, else the even division.
    """
    *batch, rows, columns = (1, *shape) if len(shape) == 1 else shape
    if count(scale) == 1:
        return Grid(1, 1, rows, columns)
    full = (*batch, rows, 1)
    if count(scale) == count(full) and scale[: len(batch) + 1] == full[:-1]:
        return Grid(rows, 1, 1, columns)  # also of scales without the last axis
    if count(scale) == count(tuple(batch)) and batch:
        return Grid(1, 1, rows, columns)  # one per matrix of a stack
    found = (1, *scale) if len(shape) == 1 and len(scale) == 1 else scale
    if len(found) != len(batch) + 2 or found[:-2] != tuple(batch) or not all(found):
        return None
    high, wide = found[-2:]
    for height, width in (*((block,) if block is not None else ()), BLOCK):
        if (-(-rows // height), -(-columns // width)) == (high, wide):
            return Grid(high, wide, height, width)
    if rows % high or columns % wide:
        return None
    return Grid(high, wide, rows // high, columns // wide)


def blocks_of_config(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Size of a block that a config declares, for the whole model; None where it declares none, or several."""
    found = {_pair(settings.get("weight_block_size"))}
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        found.add(_pair(weights.get("block_structure")) if isinstance(weights, Mapping) else None)
    found.discard(None)
    return found.pop() if len(found) == 1 else None


def _pair(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    good = all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 31 for n in value)
    return (value[0], value[1]) if good else None


def _claims(headers: Headers) -> Claims:
    """Float8 and int8 tensors with scales under one of the three names."""
    claims = Claims()
    if headers.method not in METHODS:
        return claims
    block = blocks_of_config(headers.settings)
    for name, spec in headers.specs.items():
        if not _may_be_codes(spec, headers):
            continue
        scale = _scale_of(name, headers.specs)
        if scale is None or not scale.is_floating or scale.dtype in FLOAT8:
            continue
        grid = grid_of(spec.shape, scale.shape, block)
        if grid is None:
            claims.problems.append(
                f"tensor '{name}' {list(spec.shape)} has scales '{scale.name}' {list(scale.shape)}, which fit no block "
                f"size{'' if block is None else f', also not {block[0]}x{block[1]} of config.json'}. Likely cause: a "
                "damaged or unknown layout. Fix: save a dequantised (bfloat16) copy with the library that wrote it"
            )
            continue
        zero, order = f"{name}_zero_point", f"{name}_g_idx"
        per_tensor = count(scale.shape) == 1
        claims.tensors.append(
            ScaledTensor(
                name=name,
                shape=spec.shape,
                dtype=headers.dtype,
                scheme=f"{spec.dtype}, {_words(grid, spec, per_tensor=per_tensor)}",
                parts=tuple(n for n in (name, scale.name, zero, order) if n in headers.specs),
                codes=name,
                scale=scale.name,
                grid=grid,
                zero=zero if zero in headers.specs else "",
                order=order if order in headers.specs else "",
                per_tensor=per_tensor,
                codes_dtype=spec.dtype,
                scale_dtype=scale.dtype,
            )
        )
        _check_extras(claims, headers)
    if claims.tensors:
        claims.unused += [n for n in headers.specs if n in MARKERS or n.rpartition(".")[2] in ACTIVATIONS]
    return claims


def _check_extras(claims: Claims, headers: Headers) -> None:
    """Refuse zero points and orders that do not fit the tensor claimed last."""
    coded = claims.tensors[-1]
    assert isinstance(coded, ScaledTensor)
    scale = headers.specs[coded.scale].shape
    if coded.zero and count(headers.specs[coded.zero].shape) != count(scale):
        claims.problems.append(f"tensor '{coded.zero}': expected one entry per scale, {list(scale)}, found others")
    if coded.order and headers.specs[coded.order].shape != coded.shape[-1:]:
        claims.problems.append(f"tensor '{coded.order}': expected one entry per column of '{coded.name}', found others")


def _may_be_codes(spec: TensorSpec, headers: Headers) -> bool:
    if not spec.shape or not spec.numel:
        return False
    return spec.dtype in FLOAT8 or (spec.dtype == "int8" and headers.method == "compressed-tensors")


def _scale_of(name: str, specs: Mapping[str, TensorSpec]) -> TensorSpec | None:
    stem, dot, last = name.rpartition(".")
    names = (f"{name}_scale_inv", f"{name}_scale", *((f"{stem}{dot}scale_weight",) if last == "weight" else ()))
    return next((specs[n] for n in names if n in specs), None)


def _words(grid: Grid, spec: TensorSpec, *, per_tensor: bool) -> str:
    if per_tensor:
        return "one scale per tensor"
    if grid.columns == 1:
        return "one scale per row" if grid.rows > 1 else "one scale per matrix"
    if grid.height == 1:
        return f"one scale per {grid.width} columns"
    return f"one scale per block of {grid.height}x{math.ceil(grid.width)}"


SCALED = Codec("scaled", _claims, keys={"fp8": FP8_KEYS, "compressed-tensors": COMPRESSED_KEYS})
