"""GPTQ and AWQ, for reading: integers in int32 words, stored `[I, O]`, with scales and zero points per group of inputs.

    W[o, i] = scale[g, o] * (code[i, o] - zero[g, o]),  g = g_idx[i], or i // group size

GPTQ packs codes along `I` and stores zero points less one (`checkpoint_format: gptq`), or as they are (`gptq_v2`). AWQ
packs along `O`, eight columns per word in the order 0, 2, 4, 6, 1, 3, 5, 7.
Sources: the layouts of AutoGPTQ's and GPTQModel's linear layers, and of AutoAWQ's `WQLinear_GEMM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.codecs.base import Claims, Codec, CodedTensor, Headers, StoredParts
from actmat.extras.quantised.settings import AWQ_KEYS, GPTQ_KEYS, PACKINGS
from actmat.extras.quantised.words import group_index, unpack_words

WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of its word's eight that each 4-bit code is, from the lowest bits on."""

COLUMN = torch.tensor([AWQ_ORDER.index(c) for c in range(8)])
"""Place of each column in its word."""


@dataclass(frozen=True)
class PackedLinear(CodedTensor):
    """A linear layer stored transposed: a thread keeps its codes, zero points and scales.

    Args:
        stem: name of the module.
        bits: of a code.
        groups: rows of the scales.
        sizes: entries of `qweight`, `qzeros`, `scales` and `g_idx` (0: there is none).
        awq: packed along the output features.
        shift: added to a stored zero point.
    """

    stem: str
    bits: int
    groups: int
    sizes: tuple[int, int, int, int]
    awq: bool
    shift: int

    @property
    def held_bytes(self) -> int:
        """Codes, zero points, scales (4 bytes at most) and the group of each input."""
        return 4 * sum(self.sizes)

    def decode(self, stored: StoredParts, matrix: int, start: int, stop: int) -> Tensor:
        """Output features `start:stop`."""
        words, zeros, scales, order = (
            stored.held(f"{self.stem}.{part}", 0, size) if size else None
            for part, size in zip(("qweight", "qzeros", "scales", "g_idx"), self.sizes, strict=True)
        )
        assert words is not None, "headers have codes"
        assert zeros is not None, "and zero points"
        assert scales is not None, "and scales"
        outputs = self.rows
        if self.awq:
            codes = self._of_columns(words.view(self.columns, -1), start, stop)
        else:
            codes = unpack_words(words.view(-1, outputs)[:, start:stop].t(), self.bits).t()
        zero = (self._of_columns(zeros.view(self.groups, -1), start, stop).to(torch.int16) + self.shift) & (
            (1 << self.bits) - 1
        )
        scale = scales.view(self.groups, outputs)[:, start:stop].to(torch.float32)
        group = (
            torch.arange(self.columns) // (self.columns // self.groups)
            if order is None
            else group_index(order, self.groups)
        )
        return ((codes.to(torch.float32) - zero[group]) * scale[group]).t()

    def _of_columns(self, words: Tensor, start: int, stop: int) -> Tensor:
        """Codes of columns `start:stop` of words packed along the columns."""
        per_word = WORD_BITS // self.bits
        low, high = start // per_word, -(-stop // per_word)
        codes = unpack_words(words[:, low:high], self.bits)
        if self.awq:
            codes = codes.view(len(words), -1, per_word)[:, :, COLUMN].reshape(len(words), -1)
        return codes[:, start - low * per_word : stop - low * per_word]


def _claims(headers: Headers) -> Claims:
    """Every module with `qweight`, `qzeros` and `scales`."""
    claims = Claims()
    if headers.method not in ("gptq", "awq"):
        return claims
    if headers.method == "awq" and (layout := _layout(headers, "version", "gemm")) != "gemm":
        claims.problems.append(
            f"config.json declares AWQ in the layout '{layout[:80]}'; expected 'gemm'. Fix: save a dequantised copy "
            "with the library that wrote it"
        )
        return claims
    for spec in headers.specs.values():
        stem = spec.name.removesuffix(".qweight")
        if stem == spec.name:
            continue
        found = _linear(stem, spec, headers)
        if isinstance(found, str):
            claims.problems.append(f"tensor '{spec.name}' {spec.dtype} {list(spec.shape)}: {found}")
        else:
            claims.tensors.append(found)
    return claims


def _layout(headers: Headers, name: str, default: str) -> str:
    """The layout that the config declares: by a name of older versions, which wins in transformers, or as `format`."""
    settings = headers.settings
    if name == "version" and settings.get("backend") == "llm-awq":
        return "llm-awq"
    return str(settings.get(name) or settings.get("format") or default).lower()


def _linear(stem: str, codes: TensorSpec, headers: Headers) -> PackedLinear | str:
    """The weight of a module, or why it cannot be read."""
    bits, awq = headers.settings.get("bits", headers.settings.get("w_bit")), headers.method == "awq"
    if bits not in ((4,) if awq else (2, 4, 8)):
        return f"codes of {str(bits)[:20]} bits are not read; expected {'4' if awq else '2, 4 or 8'}"
    parts: Mapping[str, TensorSpec | None] = {
        part: headers.specs.get(f"{stem}.{part}") for part in ("qzeros", "scales", "g_idx")
    }
    zeros, scales, order = parts["qzeros"], parts["scales"], None if awq else parts["g_idx"]
    if zeros is None or scales is None or codes.dtype != "int32" or zeros.dtype != "int32" or not scales.is_floating:
        return "expected int32 codes, int32 'qzeros' and floating 'scales' of the same module"
    if len(codes.shape) != 2 or len(scales.shape) != 2 or not scales.numel or not codes.numel:
        return f"expected matrices, found scales {list(scales.shape)}"
    per_word = WORD_BITS // bits
    inputs = codes.shape[0] * (1 if awq else per_word)
    groups, outputs = scales.shape
    wide = codes.shape[1] * (per_word if awq else 1)
    ordered = order is not None and order.shape == (inputs,)
    if wide != outputs or zeros.shape != (groups, -(-outputs // per_word)) or not (ordered or inputs % groups == 0):
        return f"scales {list(scales.shape)} and zero points {list(zeros.shape)} do not fit codes of {bits} bits"
    if order is not None and (not ordered or order.is_floating):
        return f"'g_idx' {list(order.shape)} does not name one group for each of {inputs} inputs"
    version = _layout(headers, "checkpoint_format", "gptq")
    if not awq and version not in PACKINGS:
        return f"its layout '{version[:80]}' is not read; expected gptq or gptq_v2"
    size = headers.settings.get("group_size", headers.settings.get("q_group_size", -1))
    per = f"{size} inputs" if size not in (-1, None) else "output"
    present = tuple(f"{stem}.{p}" for p in ("qweight", "qzeros", "scales", "g_idx") if f"{stem}.{p}" in headers.specs)
    return PackedLinear(
        name=f"{stem}.weight",
        shape=(outputs, inputs),
        dtype=headers.dtype,
        scheme=f"{headers.method.upper()} int{bits}, one scale and zero point per {per}",
        parts=present,
        stem=stem,
        bits=bits,
        groups=groups,
        sizes=(codes.numel, zeros.numel, scales.numel, 0 if order is None else order.numel),
        awq=awq,
        shift=0 if awq or version == "gptq_v2" else 1,
    )


GPTQ = Codec("gptq", _claims, keys={"gptq": GPTQ_KEYS, "awq": AWQ_KEYS})
