"""A checkpoint whose quantized tensors are read as floats, decoded by rows on reading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, TensorSpec, torch_dtype
from actmat.checkpoints.codecs.base import WINDOW, CodedTensor, StoredParts
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
        self._stored = StoredParts(inner)
        first = {c.parts[0]: c for c in self.coded.values()}
        hidden = {p for c in self.coded.values() for p in c.parts} | set(unused)
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


def without_quantization(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A config without its entries about quantization, on any level that may have them.

    >>> without_quantization({"a": 1, "quantization_config": {"quant_method": "fp8"}})
    {'a': 1}
    """
    if config is None:
        return None
    kept = {k: v for k, v in config.items() if k not in CONFIG_KEYS}
    return kept | {k: without_quantization(kept[k]) for k in LEVELS if isinstance(kept.get(k), Mapping)}
