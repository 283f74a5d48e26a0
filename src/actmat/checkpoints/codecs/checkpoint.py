"""A checkpoint whose quantized tensors are read as floats, decoded by rows on reading; and writing of codes.

Merged floats are encoded run by run, decoded again by the reader's own code, and measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, TensorSpec, torch_dtype
from actmat.checkpoints.codecs.base import WINDOW, CodedTensor, StoredParts, count
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.quantization import CONFIG_KEYS, LEVELS
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.view import CheckpointView
from actmat.errors import CheckpointError

DECODING_BYTES = 24
"""Memory while an entry is decoded: code, indices, scale and value as float32, and the result."""


class QuantizedCheckpoint(CheckpointView):
    """The logical tensors of a quantized checkpoint; closing it closes the stored one.

    Args:
        inner: the checkpoint as stored.
        coded: tensors that are decoded.
        unused: stored tensors that are not listed, such as scales of activations.
    """

    def __init__(self, inner: Checkpoint, coded: Iterable[CodedTensor], unused: Iterable[str] = ()) -> None:
        super().__init__(inner)
        self.coded: Mapping[str, CodedTensor] = MappingProxyType({c.name: c for c in coded})
        self.unused = tuple(unused)
        self._stored = StoredParts(inner)
        first = {c.parts[0]: c for c in self.coded.values()}
        hidden = {p for c in self.coded.values() for p in c.parts} | set(self.unused)
        specs: dict[str, TensorSpec] = {}
        for name, spec in inner.specs.items():
            if name in first:
                c = first[name]
                specs[c.name] = TensorSpec(c.name, c.shape, c.dtype, spec.file, spec.offset)
            elif name not in hidden:
                specs[name] = spec
        self.specs = MappingProxyType(specs)
        kept = {a: c for a, c in inner.aliases.items() if a in specs and c in specs}
        self.aliases = MappingProxyType({a: c for a, c in kept.items() if (a in self.coded) == (c in self.coded)})

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Config of the model as it is read: without the entry about quantization."""
        return without_quantization(self.inner.config)

    @property
    def written_config(self) -> Mapping[str, Any] | None:
        """The config without quantization, to replace the folder's."""
        written = self.inner.written_config
        return self.config if written is None and self.directory is not None else without_quantization(written)

    def scheme(self, name: str) -> str:
        """Description of a quantized tensor's layout; empty for any other tensor."""
        return self.coded[name].scheme if name in self.coded else ""

    def stored_specs(self, name: str) -> tuple[TensorSpec, ...]:
        """Specs of codes, scales and zero points."""
        if name not in self.coded:
            return self.inner.stored_specs(name)
        return tuple(self.inner.specs[part] for part in self.coded[name].parts)

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Fill `out` with decoded bytes of the tensor."""
        if spec.name in self.coded:
            self._decode(self.coded[spec.name], start, out)
        else:
            self.inner.read_into(spec.name, start, out)

    def prefetch(self, names: Iterable[str]) -> None:
        """Prefetch the stored parts."""
        wanted = [n for name in names for n in (self.coded[name].parts if name in self.coded else (name,))]
        self.inner.prefetch(wanted)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the codes that a thread keeps, and of its buffers while decoding."""
        coded = self.coded.values()
        held = max((c.held_bytes for c in coded), default=0)
        widest = max((max(WINDOW, c.columns) for c in coded), default=0)
        return self.inner.buffer_bytes + held + widest * DECODING_BYTES

    def handle(self) -> CheckpointHandle:
        """Address of the stored checkpoint: opening it finds the codes again."""
        return self.inner.handle()

    def _decode(self, coded: CodedTensor, start: int, out: memoryview) -> None:
        """Decode the rows that bytes `start : start + len(out)` lie in, a window at a time, never across matrices."""
        self._stored.keep_only(coded.parts)
        if not len(out):
            self._stored.entries(coded.parts[0], 0, 0)  # a closed file is an error also where nothing is read
            return
        dtype, length = torch_dtype(coded.dtype), coded.columns
        width = length * dtype.itemsize
        row, last = start // width, math.ceil((start + len(out)) / width)
        most = max(1, WINDOW // length)
        while row < last:
            matrix, inside = divmod(row, coded.rows)
            rows = min(most, last - row, coded.rows - inside)
            try:
                values = coded.decode(self._stored, matrix, inside, inside + rows).to(dtype).contiguous()
            except IndexError as error:
                raise CheckpointError(f"{self.location}: tensor '{coded.name}' is damaged: {error}") from error
            first = row * width
            low, high = max(start, first), min(start + len(out), first + rows * width)
            out[low - start : high - start] = raw_bytes(values)[low - first : high - first]
            row += rows


def coding_of(checkpoint: Checkpoint, name: str) -> CodedTensor | None:
    """Layout of a quantized tensor, in which others can be written; None if it is not quantized."""
    return checkpoint.coded.get(name) if isinstance(checkpoint, QuantizedCheckpoint) else None


def without_quantization(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A config without its entries about quantization, on any level that may have them.

    >>> without_quantization({"a": 1, "quantization_config": {"quant_method": "fp8"}})
    {'a': 1}
    """
    if config is None:
        return None
    kept = {k: v for k, v in config.items() if k not in CONFIG_KEYS}
    return kept | {k: without_quantization(kept[k]) for k in LEVELS if isinstance(kept.get(k), Mapping)}


ENCODING_BYTES = 40
"""Memory while a run is encoded: its floats, their codes and scales on the way, and the decoded floats."""


class _Sink(Protocol):
    @property
    def digest(self) -> str: ...

    def write(self, data: memoryview) -> None: ...


def encoding_bytes(coded: CodedTensor) -> int:
    """Memory that encoding a tensor takes."""
    return min(coded.granule * coded.columns, count(coded.shape)) * ENCODING_BYTES


class EncodingSink:
    """Receives a tensor as float32 bytes in row-major order; writes codes, scales and zero points to their sinks.

    Args:
        coded: layout of the tensor, whose `granule` is not 0.
        sinks: per stored name, what receives its bytes.

    Attributes:
        digest: content hash of the decoded tensor, once all of it is written.
    """

    def __init__(self, coded: CodedTensor, sinks: Mapping[str, _Sink]) -> None:
        self._coded, self._sinks = coded, sinks
        total = count(coded.shape) // coded.columns
        self._span = total if coded.granule > coded.rows else coded.rows  # else no run crosses a matrix
        self._buffer = torch.empty(min(coded.granule, self._span), coded.columns)
        self._row = self._filled = 0  # rows that are written; bytes in the buffer
        self._hash = ContentHash()
        self._error = self._norm = 0.0
        for name, value in coded.constants().items():
            sinks[name].write(raw_bytes(value))

    @property
    def digest(self) -> str:
        """Content hash of the decoded tensor."""
        return self._hash.hexdigest()

    @property
    def hashes(self) -> dict[str, str]:
        """Content hash of every stored part."""
        return {name: sink.digest for name, sink in self._sinks.items()}

    @property
    def error(self) -> float:
        """Relative error of the codes: `||decoded - merged||_F / ||merged||_F`."""
        return math.sqrt(self._error / self._norm) if self._norm else 0.0

    def write(self, data: memoryview) -> None:
        """Append bytes of the merged tensor."""
        memory, done = raw_bytes(self._buffer), 0
        while done < len(data):
            rows = min(len(self._buffer), self._span - self._row % self._span)
            wanted = rows * self._coded.columns * 4
            length = min(wanted - self._filled, len(data) - done)
            memory[self._filled : self._filled + length] = data[done : done + length]
            done += length
            self._filled += length
            if self._filled == wanted:
                self._encode(rows)

    def _encode(self, rows: int) -> None:
        values = self._buffer[:rows]
        parts = {name: part.contiguous() for name, part in self._coded.encode(values).items()}
        with MemoryCheckpoint(parts) as held:
            decoded = self._coded.part(rows).decode(StoredParts(held), 0, 0, rows)
        decoded = decoded.to(torch_dtype(self._coded.dtype)).contiguous()
        self._hash.update(raw_bytes(decoded))
        self._error += float((decoded.double() - values.double()).square().sum())
        self._norm += float(values.double().square().sum())
        for name, part in parts.items():
            self._sinks[name].write(raw_bytes(part))
        self._row += rows
        self._filled = 0
