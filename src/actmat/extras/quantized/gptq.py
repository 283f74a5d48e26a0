"""GPTQ and AWQ (read only): integers in int32 words, stored `[I, O]`, with scales and zero points per input group.

    W[o, i] = scale[g, o] * (code[i, o] - zero[g, o]),  g = g_idx[i], or i // group size

GPTQ packs codes along `I` and stores zero points minus one (`checkpoint_format: gptq`) or unchanged (`gptq_v2`). AWQ
packs along `O`, eight columns per word in the order 0, 2, 4, 6, 1, 3, 5, 7.
Sources: the layouts of AutoGPTQ's and GPTQModel's linear layers, and of AutoAWQ's `WQLinear_GEMM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.codecs.base import Codec, CodedTensor, CodeReader, Headers
from actmat.extras.quantized.settings import AWQ_KEYS, GPTQ_KEYS
from actmat.extras.quantized.words import group_index, unpack_words

WORD_BITS = 32
BITS = {"gptq": (2, 4, 8), "awq": (4,)}
"""Method -> supported bits per code."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, of a word's eight, of each 4-bit code, from the lowest bits."""

COLUMN = torch.tensor([AWQ_ORDER.index(c) for c in range(8)])
"""Position of each column in its word."""


@dataclass(frozen=True)
class PackedLinear(CodedTensor):
    """A linear layer stored transposed as `qweight`, `qzeros`, `scales` and optionally `g_idx`; cached per thread.

    Args:
        bits: bits per code.
        groups: number of rows of the scales.
        stored_entries: number of entries of all parts.
        awq: whether codes are packed along the output features.
        shift: constant added to a stored zero point.
    """

    bits: int
    groups: int
    stored_entries: int
    awq: bool
    shift: int

    @property
    def held_bytes(self) -> int:
        """Bytes of codes, zero points, scales (at most 4 bytes each) and the group of each input."""
        return 4 * self.stored_entries

    def decode(self, stored: CodeReader, matrix: int, start: int, stop: int) -> Tensor:
        """Decode output features `start:stop`."""
        words, zeros, scales, *order = (stored.held(p, 0, stored.inner.specs[p].numel) for p in self.parts)
        if self.awq:
            codes = self._of_columns(words.view(self.columns, -1), start, stop)
        else:
            codes = unpack_words(words.view(-1, self.rows)[:, start:stop].t(), self.bits).t()
        mask = (1 << self.bits) - 1
        zero = (self._of_columns(zeros.view(self.groups, -1), start, stop).to(torch.int16) + self.shift) & mask
        scale = scales.view(self.groups, self.rows)[:, start:stop].to(torch.float32)
        in_order = torch.arange(self.columns) // (self.columns // self.groups)
        group = group_index(order[0], self.groups) if order else in_order
        return ((codes.to(torch.float32) - zero[group]) * scale[group]).t()

    def _of_columns(self, words: Tensor, start: int, stop: int) -> Tensor:
        """Codes of columns `start:stop`, from words packed along the columns."""
        per_word = WORD_BITS // self.bits
        low, high = start // per_word, -(-stop // per_word)
        codes = unpack_words(words[:, low:high], self.bits)
        if self.awq:
            codes = codes.view(len(words), -1, per_word)[:, :, COLUMN].reshape(len(words), -1)
        return codes[:, start - low * per_word : stop - low * per_word]


def _find(codes: TensorSpec, headers: Headers) -> PackedLinear | str | None:
    """Recognize a module with `qweight`, `qzeros` and `scales`."""
    stem, awq = codes.name.removesuffix(".qweight"), headers.method == "awq"
    if stem == codes.name:
        return None
    settings = headers.settings
    bits = settings.get("bits", settings.get("w_bit"))
    if bits not in BITS[headers.method]:
        expected = " or ".join(map(str, BITS[headers.method]))
        return f"codes of {str(bits)[:20]} bits are not supported; expected {expected}"
    if awq and settings.get("backend") == "llm-awq":
        return "the AWQ layout 'llm-awq' is not supported; expected 'gemm'"
    named = (f"{stem}.{part}" for part in ("qzeros", "scales", *(() if awq else ("g_idx",))))
    others = [headers.specs[name] for name in named if name in headers.specs]
    if problem := _misfit(codes, others, WORD_BITS // bits, awq=awq):
        return problem
    (groups, outputs), per_word = others[1].shape, WORD_BITS // bits
    size = settings.get("group_size", settings.get("q_group_size", -1))
    per = f"{size} inputs" if size not in (-1, None) else "output"
    layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    return PackedLinear(
        name=f"{stem}.weight",
        shape=(outputs, codes.shape[0] * (1 if awq else per_word)),
        dtype=headers.dtype,
        scheme=f"{headers.method.upper()} int{bits}, one scale and zero point per {per}",
        parts=(codes.name, *(spec.name for spec in others)),
        bits=bits,
        groups=groups,
        stored_entries=codes.numel + sum(spec.numel for spec in others),
        awq=awq,
        shift=0 if awq or layout == "gptq_v2" else 1,
    )


def _misfit(codes: TensorSpec, others: Sequence[TensorSpec], per_word: int, *, awq: bool) -> str:
    """Reason why zero points, scales and input order do not match the codes; may be empty."""
    if [spec.name.rpartition(".")[2] for spec in others[:2]] != ["qzeros", "scales"]:
        return "expected 'qzeros' and 'scales' of the same module"
    zeros, scales, *order = others
    if (codes.dtype, zeros.dtype) != ("int32", "int32") or not scales.is_floating:
        return f"expected codes and zero points of int32 and floating scales, found {zeros.dtype} and {scales.dtype}"
    if not len(codes.shape) == len(scales.shape) == 2 or not scales.numel or not codes.numel:
        return f"expected matrices, found scales {list(scales.shape)}"
    inputs, wide = (n * m for n, m in zip(codes.shape, (1, per_word) if awq else (per_word, 1), strict=True))
    groups, outputs = scales.shape
    if wide != outputs or zeros.shape != (groups, -(-outputs // per_word)) or (not order and inputs % groups):
        return f"scales {list(scales.shape)} and zero points {list(zeros.shape)} do not match {inputs} inputs"
    if order and (order[0].shape != (inputs,) or order[0].is_floating):
        return f"'g_idx' {list(order[0].shape)} does not have one group for each of {inputs} inputs"
    return ""


GPTQ = Codec("gptq", tuple(BITS), _find, keys={"gptq": GPTQ_KEYS, "awq": AWQ_KEYS})
