"""NVFP4 and MXFP4 of compressed-tensors: 4-bit floats (e2m1) in groups of a row, with a scale per group.

    NVFP4   W[o, i] = code[o, i] * (scale[o, i // 16] / global)    scale: float8 e4m3; global: one float32
    MXFP4   W[o, i] = code[o, i] * 2^(scale[o, i // 32] - 127)      scale: uint8

Stored as `NAME_packed` (uint8, two codes per byte, the low half first), `NAME_scale`, and `NAME_global_scale` of NVFP4.
Scales of activations (`input_global_scale`) are ignored. Source: compressed-tensors, `compressors/nvfp4`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.codecs.base import Codec, CodedTensor, CodeReader, Headers
from actmat.extras.quantized.mxfp4 import E2M1, OFFSET
from actmat.extras.quantized.scaled import ACTIVATIONS
from actmat.extras.quantized.settings import COMPRESSED_KEYS
from actmat.extras.quantized.words import nibbles

NV_GROUP, MX_GROUP = 16, 32
"""Number of columns that share a scale."""


@dataclass(frozen=True)
class Fp4Tensor(CodedTensor):
    """Packed 4-bit floats; `parts`: codes, scales and, for NVFP4, the global scale."""

    group: int

    def decode(self, stored: CodeReader, matrix: int, start: int, stop: int) -> Tensor:
        """Decode to codes times scales."""
        first, rows, groups = matrix * self.rows + start, stop - start, self.columns // self.group
        packed = stored.entries(self.parts[0], first * self.columns // 2, rows * self.columns // 2)
        codes = torch.tensor(E2M1)[nibbles(packed).long()].view(rows, groups, self.group)
        scales = stored.entries(self.parts[1], first * groups, rows * groups).view(rows, groups)
        if self.group == NV_GROUP:
            wide = scales.to(torch.float32) / stored.entries(self.parts[2], 0, 1).to(torch.float32)
        else:
            wide = torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - OFFSET)
        return (codes * wide[..., None]).view(rows, self.columns)


def _find(packed: TensorSpec, headers: Headers) -> Fp4Tensor | str | None:
    """Recognize a `NAME_packed` of bytes with scales of either kind."""
    name = packed.name.removesuffix("_packed")
    if name == packed.name or packed.dtype != "uint8" or len(packed.shape) != 2:
        return None
    scale, overall = headers.specs.get(f"{name}_scale"), headers.specs.get(f"{name}_global_scale")
    kinds = {"float8_e4m3fn": ("NVFP4", NV_GROUP), "uint8": ("MXFP4", MX_GROUP)}
    if scale is None or scale.dtype not in kinds:
        dtype = "none" if scale is None else f"{scale.dtype}"
        return f"expected scales '{name}_scale' of float8_e4m3fn (NVFP4) or uint8 (MXFP4), found {dtype}"
    if f"{name}_zero_point" in headers.specs:
        return f"4-bit floats with zero points ('{name}_zero_point') are not supported"
    kind, group = kinds[scale.dtype]
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if columns % group or scale.shape != (rows, columns // group):
        return f"expected one scale per {group} of its {columns} columns, found {list(scale.shape)}"
    if kind == "NVFP4" and (overall is None or overall.dtype != "float32" or overall.numel != 1):
        return f"expected one float32 '{name}_global_scale', found {'none' if overall is None else overall.shape}"
    if kind == "MXFP4" and overall is not None:
        return f"'{overall.name}' together with power-of-two scales is not supported"
    words = "one power of two" if overall is None else "one fp8 scale"
    return Fp4Tensor(
        name=name,
        shape=(rows, columns),
        dtype=headers.dtype,
        scheme=f"{kind}, {words} per {group} columns",
        parts=(packed.name, scale.name, *(() if overall is None else (overall.name,))),
        group=group,
    )


FP4 = Codec("fp4", ("", "compressed-tensors"), _find, ACTIVATIONS, {"compressed-tensors": COMPRESSED_KEYS})
