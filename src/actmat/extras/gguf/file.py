"""GGUF files as models with transformers' names, dequantized row by row by the package gguf; their tokenizers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.codecs.base import CodedTensor, CodeReader
from actmat.checkpoints.codecs.quantized import QuantizedTensors
from actmat.checkpoints.files import FileReader
from actmat.checkpoints.model import CONFIG, Format, Model, ModelFolder
from actmat.checkpoints.source import Source, TensorFiles
from actmat.errors import CheckpointError
from actmat.extras.gguf.header import VOCABULARY, GgufEntry, GgufHeader, SkippedList, joined, parts_of, read_gguf_header
from actmat.extras.gguf.names import UNUSED, added, config_of, names_of, rotated_heads, undescribed

if TYPE_CHECKING:
    import numpy

SUFFIX = ".gguf"
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTIZED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4"),
)
"""Tensor types that the package gguf dequantizes."""


@dataclass(frozen=True)
class GgufFolder(ModelFolder):
    """A folder whose config and tokenizer are in the header of its weight file.

    Args:
        metadata: of the file.
        file: that has it.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    file: Path = Path()

    @property
    def copies_config(self) -> bool:
        """False: one that the header does not describe wholly is not written."""
        return False

    def tokens(self) -> Sequence[str]:
        """The tokens in the metadata; empty for padding, and for WordPiece, which is written otherwise."""
        listed = self.metadata.get(VOCABULARY)
        if not isinstance(listed, SkippedList) or self.metadata.get("tokenizer.ggml.model") not in ("gpt2", "llama"):
            return ()
        return ["" if token == f"[PAD{row}]" else token for row, token in enumerate(listed.texts)]

    def header_settings(self) -> Mapping[str, Any]:
        """The template, numbers of special tokens and all else on the tokenizer but its lists."""
        return {k: v for k, v in self.metadata.items() if k.startswith("tokenizer.") and not isinstance(v, SkippedList)}

    def converted_tokenizer(self) -> Mapping[str, str]:
        """Name of a file -> text; empty if transformers is missing or cannot convert it, which the output then says."""
        try:
            from transformers import AutoTokenizer

            names = {"gguf_file": self.file.name, "local_files_only": True}
            tokenizer = AutoTokenizer.from_pretrained(self.file.parent, **names)
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                return {f.name: f.read_text(encoding="utf-8") for f in sorted(Path(folder).iterdir()) if f.is_file()}
        except Exception:  # noqa: BLE001 - converters of each architecture raise errors of many types
            return {}


class GgufFile(TensorFiles):
    """The stored tensors of one file, or of all parts of a split file; downloaded when opened.

    Quantized tensors are rows of bytes.
    """

    def __init__(self, source: Source, labels: Sequence[str]) -> None:
        super().__init__(source, labels)
        files = {label: source.fetch(label) for label in labels}
        self.first_file = files[labels[0]]  # has the metadata
        self._reader = FileReader(files)
        try:
            sizes = [self._reader.size(label) for label in labels]
            headers = [
                read_gguf_header(partial(self._reader.read, label), size, file=f"{source.location}")
                for label, size in zip(labels, sizes, strict=True)
            ]
            self.gguf = joined(headers, source.location)
            specs: dict[str, TensorSpec] = {}
            for header, label, size in zip(headers, labels, sizes, strict=True):
                specs |= _stored_specs(header, label, size, source.location)
            self.specs = MappingProxyType(specs)
        except CheckpointError:
            self._reader.close()
            raise

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Fill with stored bytes."""
        self._reader.read_into(spec.file, spec.offset + start, out, tensor=spec.name)

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the operating system to read ahead."""
        for spec in (self.specs[name] for name in names if name in self.specs):
            self._reader.prefetch(spec.file, spec.offset, spec.nbytes)

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._reader.close()


def _folder(tensors: GgufFile) -> ModelFolder:
    """Everything beside the tensors."""
    source, config = tensors.source, config_of(tensors.gguf)
    why = undescribed(tensors.gguf)
    note = f"{why}: no config.json can be made from it; copy the original model's config.json into the output"
    folder = GgufFolder(
        config,
        written={} if why else {CONFIG: config},
        files=(source,),
        merged=tensors.labels,
        metadata=tensors.gguf.metadata,
        file=tensors.first_file,
    )
    return folder.noted(*source.notes, *([note] if why else ()))


def _type_of(tensor: GgufEntry) -> tuple[str, int, int]:
    """Name of a tensor's type, entries per block and bytes per block; the name is empty for an unsupported type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        type = GGMLQuantizationType(tensor.type)
    except ValueError:
        return "", 1, 1
    name = type.name if type.name in PLAIN or type.name in QUANTIZED else ""
    return name, *GGML_QUANT_SIZES[type]


def _stored_specs(header: GgufHeader, label: str, size: int, location: str) -> dict[str, TensorSpec]:
    """Specs of the stored tensors, in file order; checks that they lie within the file and do not overlap."""
    specs, problems = [], []
    for tensor in header.tensors:
        name, entries, nbytes = _type_of(tensor)
        where = f"{location}: tensor {tensor.name[:120]!r} {list(tensor.shape)}"
        columns = tensor.shape[-1] if tensor.shape else 1
        if not name:
            problems.append(f"{where} has the unsupported type {tensor.type}")
        elif columns % entries:
            problems.append(f"{where}: rows of {name} end within a block of {entries}")
        else:
            width = (*tensor.shape[:-1], columns // entries * nbytes)
            shape, dtype = (tensor.shape, PLAIN[name]) if name in PLAIN else (width, "uint8")
            specs.append(TensorSpec(tensor.name, shape, dtype, label, tensor.offset))
    end = 0
    ordered = sorted(specs, key=lambda s: s.offset)
    for spec in ordered:
        if spec.offset < end or spec.offset + spec.nbytes > size:
            problems.append(
                f"{location}: tensor {spec.name[:120]!r} has bytes {spec.offset} to {spec.offset + spec.nbytes}, "
                f"which overlap another tensor or are beyond the file's {size}"
            )
        end = max(end, spec.offset + spec.nbytes)
    if problems:
        raise CheckpointError(f"{location}: tensors cannot be read", problems)
    return {spec.name: spec for spec in ordered}


@dataclass(frozen=True)
class GgufTensor(CodedTensor):
    """One tensor of the file.

    Args:
        type: name of its type.
        heads: number of heads whose rows are in llama.cpp's order; 0: rows are in order.
        shift: constant that llama.cpp added to every entry.
    """

    type: str
    heads: int
    shift: float = 0.0

    def decode(self, stored: CodeReader, matrix: int, start: int, stop: int) -> Tensor:
        """Rows in transformers' order: half `p`, pair `d` of a head is row `2 d + p` of that head in the file."""
        rows = torch.arange(start, stop) + matrix * self.rows
        is_bias = len(self.shape) < 2  # one entry per row of the weight
        if self.heads and not is_bias:
            rows = _order(rows, self.rows, self.heads)
        low, high = int(rows.min()), int(rows.max()) + 1
        spec = stored.inner.specs[self.parts[0]]
        width = spec.shape[-1] if spec.shape else 1
        data = stored.entries(spec.name, low * width, (high - low) * width).view(high - low, width)[rows - low]
        if self.type not in PLAIN:
            from gguf import GGMLQuantizationType, dequantize

            values: numpy.ndarray[Any, Any] = dequantize(data.numpy(), GGMLQuantizationType[self.type])
            data = torch.from_numpy(values).view(stop - start, self.columns)
        if self.heads and is_bias:
            data = data[:, _order(torch.arange(self.columns), self.columns, self.heads)]
        return data - self.shift if self.shift else data


def _order(rows: Tensor, count: int, heads: int) -> Tensor:
    """File rows of the given transformers rows, of a tensor with `count` rows."""
    pairs = count // heads // 2
    head, inside = rows // (2 * pairs), rows % (2 * pairs)
    return head * 2 * pairs + inside % pairs * 2 + inside // pairs


def rows_in_file(header: GgufHeader, tensor: GgufEntry) -> Tensor | None:
    """Transformers row of each file row of a tensor; None if the order is the same."""
    heads = rotated_heads(header, tensor.name)
    count = tensor.shape[-2] if len(tensor.shape) > 1 else tensor.shape[0]
    return _order(torch.arange(count), count, heads).argsort() if heads > 0 else None


def _open(source: Source) -> Model:
    """Open the only GGUF file of a source, or all parts of a split file.

    Raises:
        CheckpointError: there are several files, the package gguf is missing, or a file cannot be read.
    """
    listed = [name for name in source.weights if name.endswith(SUFFIX)]
    parts = parts_of(source.named or (listed or [""])[0])
    if source.named is None and listed != parts:
        missing = [name for name in parts if name not in listed]
        raise CheckpointError(
            f"{source.location}: expected one GGUF file, or all parts of one, found {', '.join(listed[:8])}"
            + (f" without {missing[0]}" if len(parts) > 1 and missing else "")
            + ". Fix: give the path of one file, or fetch the missing parts."
        )
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise CheckpointError(
            f"{source.location}: reading GGUF files needs the package gguf. Fix: pip install 'actmat[gguf]'."
        ) from None
    stored = GgufFile(source, parts)
    try:
        tensors = QuantizedTensors(stored, _coded(stored), [n for n in UNUSED if n in stored.specs])
        return Model(tensors, _folder(stored))
    except CheckpointError:
        stored.close()
        raise


def _coded(stored: GgufFile) -> list[CodedTensor]:
    names = names_of(stored.gguf, stored.location)
    out: list[CodedTensor] = []
    for tensor in stored.gguf.tensors:
        if tensor.name not in names:
            continue
        kind, *_ = _type_of(tensor)
        heads = rotated_heads(stored.gguf, tensor.name)
        rows = tensor.shape[-2] if len(tensor.shape) > 1 else tensor.shape[0] if tensor.shape else 1
        if heads and (heads < 0 or rows % (2 * heads)):
            raise CheckpointError(
                f"{stored.location}: tensor {tensor.name[:120]!r} has {rows} rows, which do not divide into pairs "
                f"for the {heads} heads of the metadata, so transformers' row order is unknown"
            )
        words = "" if kind in PLAIN else f"GGUF {kind}"
        dtype = PLAIN.get(kind, "bfloat16")
        shift = added(stored.gguf, tensor.name)
        out.append(GgufTensor(names[tensor.name], tensor.shape, dtype, words, (tensor.name,), kind, heads, shift))
    return out


GGUF = Format(lambda source: any(n.endswith(SUFFIX) for n in source.weights), _open)
