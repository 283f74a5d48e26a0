"""MXFP4 of gpt-oss: experts as 4-bit floats (e2m1) in blocks of 32, each with a power-of-two scale.

`NAME_blocks` is `[E, O, I / 32, 16]`, two codes per byte, the low half first; `NAME_scales` is `[E, O, I / 32]`,
exponents with an offset of 127. The logical tensor is transposed, as in transformers: `NAME [E, I, O]`.
Source: OCP Microscaling Formats (MX) specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.codecs.base import Codec, CodedTensor, CodeReader, Headers
from actmat.extras.quantized.settings import MXFP4_KEYS
from actmat.extras.quantized.words import nibbles

BLOCK, OFFSET = 32, 127
HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*HALF, *(-value for value in HALF))
"""Value of each 4-bit code."""


@dataclass(frozen=True)
class Mxfp4Tensor(CodedTensor):
    """A stack of experts whose matrices are stored transposed; each thread caches the codes of one matrix.

    `parts`: blocks and scales.
    """

    @property
    def held_bytes(self) -> int:
        """Bytes of the codes and scales of one matrix."""
        return self.rows * self.columns // BLOCK * (BLOCK // 2 + 1)

    def decode(self, stored: CodeReader, matrix: int, start: int, stop: int) -> Tensor:
        """Decode input features `start:stop`, each with all `O` outputs."""
        outputs, runs = self.columns, self.rows // BLOCK
        blocks = stored.held(self.parts[0], matrix, outputs * runs * BLOCK // 2).view(outputs, runs, BLOCK // 2)
        scales = stored.held(self.parts[1], matrix, outputs * runs).view(outputs, runs)
        low, high = start // BLOCK, -(-stop // BLOCK)
        codes = nibbles(blocks[:, low:high].contiguous())
        values = torch.tensor(E2M1)[codes.long()]
        exponents = scales[:, low:high, None].to(torch.int32) - OFFSET
        wide = torch.ldexp(values, exponents).view(outputs, -1)
        return wide[:, start - low * BLOCK : stop - low * BLOCK].t()


def _find(spec: TensorSpec, headers: Headers) -> Mxfp4Tensor | str | None:
    """Recognize a pair `NAME_blocks`, `NAME_scales` of bytes."""
    name = spec.name.removesuffix("_blocks")
    scales = headers.specs.get(f"{name}_scales")
    if name == spec.name or scales is None or (spec.dtype, scales.dtype) != ("uint8", "uint8"):
        return None
    if len(spec.shape) < 3 or spec.shape[-1] != BLOCK // 2 or spec.shape[:-1] != scales.shape:
        return f"expected blocks of {BLOCK // 2} bytes and one scale each, found scales {list(scales.shape)}"
    *batch, outputs, runs, _ = spec.shape
    words = "MXFP4, one power of two per 32 entries"
    return Mxfp4Tensor(name, (*batch, runs * BLOCK, outputs), headers.dtype, words, (spec.name, scales.name))


MXFP4 = Codec("mxfp4", ("", "mxfp4"), _find, keys={"mxfp4": MXFP4_KEYS})
