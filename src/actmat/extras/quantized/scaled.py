"""8-bit codes with scales on a grid: `W[o, i] = (code[o, i] - zero[r, c]) * scale[r, c]` in block `r, c`.

| stored next to the codes `NAME` | written by |
|---|---|
| `NAME_scale_inv`, one per block, 128 x 128 by default, the last ones smaller | DeepSeek-V3, transformers' fp8 |
| `STEM.scale_weight`, or `NAME_scale`, one | single files of image tools, `fp8_scaled` |
| `NAME_scale`, one, one per row, per group of columns or per block; `NAME_zero_point` | compressed-tensors |

The scale is always a factor, also under the name `scale_inv`. Products are formed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.codecs.base import Codec, CodedTensor, CodeReader, Headers
from actmat.extras.quantized.settings import COMPRESSED_KEYS, FP8_KEYS
from actmat.extras.quantized.words import group_index

METHODS = ("", "fp8", "compressed-tensors")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
BLOCK = (128, 128)
ACTIVATIONS = ("input_scale", "scale_input", "activation_scale", "input_zero_point", "output_scale",
               "k_scale", "v_scale", "q_scale", "input_global_scale")  # fmt: skip
"""Name suffixes of scales of activations and caches, which are ignored."""

MARKERS = ("scaled_fp8", "comfy_quant")
"""Marker tensors in single files: of the whole file, without content, and of a layer, with the name of its format."""


@dataclass(frozen=True)
class Grid:
    """Blocks of a matrix that share a scale.

    Args:
        rows, columns: number of block rows and block columns.
        height, width: size of a block in entries; the last blocks may be smaller.
    """

    rows: int
    columns: int
    height: int
    width: int

    def expand(self, values: Tensor, start: int, stop: int, length: int, order: Tensor | None = None) -> Tensor:
        """Expand grid values to matrix rows `start:stop`, one value per entry: `[stop - start, 1 or I]`.

        Args:
            values: `[blocks, columns]`, starting at the block of row `start`.
            length: `I`.
            order: block of each column, if columns are permuted (`g_idx`).
        """
        if self.rows > 1:
            values = values[torch.arange(start, stop) // self.height - start // self.height]
        if order is not None:
            return values[:, order]
        return values.repeat_interleave(self.width, 1)[:, :length] if self.columns > 1 else values

    def blocks(self, start: int, stop: int) -> tuple[int, int]:
        """Range of grid rows that overlap matrix rows `start:stop`."""
        return (start // self.height, -(-stop // self.height)) if self.rows > 1 else (0, 1)


@dataclass(frozen=True)
class GridTensor(CodedTensor):
    """Codes with a grid of scales per matrix; `parts`: codes, scales, and other stored tensors.

    Zero points and the block of each column, if stored, are named `NAME_zero_point` and `NAME_g_idx`.
    """

    grid: Grid
    per_tensor: bool = False

    @property
    def zero(self) -> str:
        """Stored name of the zero points; may be empty."""
        return self.stored_as(f"{self.name}_zero_point")

    @property
    def order(self) -> str:
        """Stored name of the block of each column; empty if columns are in order."""
        return self.stored_as(f"{self.name}_g_idx")

    def column_blocks(self, stored: CodeReader) -> Tensor | None:
        """Block of each column; None if columns are in order."""
        return group_index(stored.entries(self.order, 0, self.columns), self.grid.columns) if self.order else None

    def of_grid(
        self, stored: CodeReader, name: str, matrix: int, start: int, stop: int, order: Tensor | None
    ) -> Tensor:
        """Values of the grid `name`, one per entry of matrix rows `start:stop`."""
        grid = self.grid
        low, high = grid.blocks(start, stop)
        first = 0 if self.per_tensor else (matrix * grid.rows + low) * grid.columns
        values = stored.entries(name, first, (high - low) * grid.columns)
        return grid.expand(values.view(high - low, grid.columns).to(torch.float32), start, stop, self.columns, order)


@dataclass(frozen=True)
class ScaledTensor(GridTensor):
    """8-bit codes."""

    def decode(self, stored: CodeReader, matrix: int, start: int, stop: int) -> Tensor:
        """Decode to codes times scales."""
        first, length = matrix * self.rows + start, self.columns
        codes = stored.entries(self.name, first * length, (stop - start) * length)
        values, order = codes.view(stop - start, length).to(torch.float32), self.column_blocks(stored)
        if self.zero:
            values -= self.of_grid(stored, self.zero, matrix, start, stop, order)
        return values.mul_(self.of_grid(stored, self.parts[1], matrix, start, stop, order))


def grid_of(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> Grid | None:
    """Grid of a matrix shape, from the shape of its scales; None if they do not match.

    >>> grid_of((300, 200), (3, 2), None)
    Grid(rows=3, columns=2, height=128, width=128)
    >>> grid_of((300, 200), (300, 1), None)
    Grid(rows=300, columns=1, height=1, width=200)

    Args:
        block: block size of the config; default: 128 x 128 if it matches, else an even division.
    """
    *batch, rows, columns = (1, *shape) if len(shape) == 1 else shape
    if math.prod(scale) == 1:
        return Grid(1, 1, rows, columns)
    full = (*batch, rows, 1)
    if math.prod(scale) == math.prod(full) and scale[: len(batch) + 1] == full[:-1]:
        return Grid(rows, 1, 1, columns)  # also scales without the last axis
    if math.prod(scale) == math.prod(tuple(batch)) and batch:
        return Grid(1, 1, rows, columns)  # one per matrix of a stack
    grid = (1, *scale) if len(shape) == 1 and len(scale) == 1 else scale
    if len(grid) != len(batch) + 2 or grid[:-2] != tuple(batch) or not all(grid):
        return None
    high, wide = grid[-2:]
    for height, width in (*((block,) if block is not None else ()), BLOCK):
        if (-(-rows // height), -(-columns // width)) == (high, wide):
            return Grid(high, wide, height, width)
    if rows % high or columns % wide:
        return None
    return Grid(high, wide, rows // high, columns // wide)


def blocks_of_config(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Block size declared in the config for the whole model; None if missing or not unique."""
    blocks = {_pair(settings.get("weight_block_size"))}
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        blocks.add(_pair(weights.get("block_structure")) if isinstance(weights, Mapping) else None)
    blocks.discard(None)
    return blocks.pop() if len(blocks) == 1 else None


def _pair(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    good = all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 31 for n in value)
    return (value[0], value[1]) if good else None


def _find(spec: TensorSpec, headers: Headers) -> ScaledTensor | str | None:
    """Recognize a float8 or int8 tensor with scales under one of the three names."""
    name, specs = spec.name, headers.specs
    is_int8 = spec.dtype == "int8" and headers.method == "compressed-tensors"
    scale = _scale_of(name, specs) if spec.shape and spec.numel and (spec.dtype in FLOAT8 or is_int8) else None
    if scale is None or not scale.is_floating or scale.dtype in FLOAT8:
        return None
    block = blocks_of_config(headers.settings)
    grid = grid_of(spec.shape, scale.shape, block)
    if grid is None:
        also = "" if block is None else f", including {block[0]}x{block[1]} of config.json"
        return f"its scales '{scale.name}' {list(scale.shape)} match no block size{also}; a damaged or unknown layout"
    zero, order = specs.get(f"{name}_zero_point"), specs.get(f"{name}_g_idx")
    if zero is not None and zero.numel != scale.numel:
        return f"expected one entry of '{zero.name}' per scale, {list(scale.shape)}, found {list(zero.shape)}"
    if order is not None and order.shape != spec.shape[-1:]:
        return f"expected one entry of '{order.name}' per column, found {list(order.shape)}"
    per_tensor = scale.numel == 1
    return ScaledTensor(
        name=name,
        shape=spec.shape,
        dtype=headers.dtype,
        scheme=f"{spec.dtype}, {_words(grid, per_tensor=per_tensor)}",
        parts=(name, scale.name, *(s.name for s in (zero, order) if s is not None)),
        grid=grid,
        per_tensor=per_tensor,
    )


def _scale_of(name: str, specs: Mapping[str, TensorSpec]) -> TensorSpec | None:
    stem, dot, last = name.rpartition(".")
    names = (f"{name}_scale_inv", f"{name}_scale", *((f"{stem}{dot}scale_weight",) if last == "weight" else ()))
    return next((specs[n] for n in names if n in specs), None)


def _words(grid: Grid, *, per_tensor: bool) -> str:
    if per_tensor:
        return "one scale per tensor"
    if grid.columns == 1:
        return "one scale per row" if grid.rows > 1 else "one scale per matrix"
    if grid.height == 1:
        return f"one scale per {grid.width} columns"
    return f"one scale per block of {grid.height}x{grid.width}"


SCALED = Codec(
    "scaled", METHODS, _find, (*ACTIVATIONS, *MARKERS), {"fp8": FP8_KEYS, "compressed-tensors": COMPRESSED_KEYS}
)
