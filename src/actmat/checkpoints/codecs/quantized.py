"""Quantized tensors that are read as floats, decoded by rows on reading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from actmat.checkpoints.base import Tensors, TensorsHandle, TensorSpec, View, torch_dtype
from actmat.checkpoints.codecs.base import WINDOW, CodedTensor, CodeReader
from actmat.checkpoints.model import Config
from actmat.checkpoints.quantization import CONFIG_KEYS, LEVELS
from actmat.checkpoints.raw import raw_bytes
from actmat.errors import CheckpointError

DECODING_BYTES = 24
"""Memory while an entry is decoded: code, indices, scale and value as float32, and the result."""


class QuantizedTensors(View):
    """The logical tensors of quantized ones; closing them closes the stored ones.

    Args:
        stored: the tensors as they are stored.
        coded: tensors that are decoded.
        unused: stored tensors that are not listed, such as scales of activations.
    """

    def __init__(self, stored: Tensors, coded: Iterable[CodedTensor], unused: Iterable[str] = ()) -> None:
        super().__init__([stored])
        self.stored, self._reader = stored, CodeReader(stored)
        self.coded: Mapping[str, CodedTensor] = MappingProxyType({c.name: c for c in coded})
        first = {c.parts[0]: c for c in self.coded.values()}
        hidden = {p for c in self.coded.values() for p in c.parts} | set(unused)
        specs: dict[str, TensorSpec] = {}
        for name, spec in stored.specs.items():
            if name in first:
                c = first[name]
                specs[c.name] = TensorSpec(c.name, c.shape, c.dtype, spec.file, spec.offset)
            elif name not in hidden:
                specs[name] = spec
        self.specs = MappingProxyType(specs)
        self.aliases = {
            a: c
            for a, c in stored.aliases.items()
            if a in specs and c in specs and (a in self.coded) == (c in self.coded)
        }

    def parts(self, name: str) -> tuple[tuple[TensorSpec, ...], str]:
        """Codes, scales and zero points, with a description of their layout."""
        if name not in self.coded:
            return self.stored.parts(name)
        coded = self.coded[name]
        return tuple(self.stored.specs[part] for part in coded.parts), coded.scheme

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Fill `out` with decoded bytes of the tensor."""
        if spec.name in self.coded:
            self._decode(self.coded[spec.name], start, out)
        else:
            self.stored.read_into(spec.name, start, out)

    def prefetch(self, names: Iterable[str]) -> None:
        """Prefetch the stored parts."""
        self.stored.prefetch([n for name in names for n in (self.coded[name].parts if name in self.coded else (name,))])

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the codes that a thread keeps, and of its buffers while decoding."""
        coded = self.coded.values()
        held = max((c.held_bytes for c in coded), default=0)
        widest = max((max(WINDOW, c.columns) for c in coded), default=0)
        return super().buffer_bytes + held + widest * DECODING_BYTES

    def handle(self) -> TensorsHandle:
        """Address of the stored tensors: opening them finds the codes again."""
        return self.stored.handle()

    def _decode(self, coded: CodedTensor, start: int, out: memoryview) -> None:
        """Decode the rows that bytes `start : start + len(out)` lie in, a window at a time, never across matrices."""
        self._reader.keep_only(coded.parts)
        if not len(out):
            self._reader.entries(coded.parts[0], 0, 0)  # a closed file is an error also where nothing is read
            return
        dtype, length = torch_dtype(coded.dtype), coded.columns
        width = length * dtype.itemsize
        row, last = start // width, math.ceil((start + len(out)) / width)
        most = max(1, WINDOW // length)
        while row < last:
            matrix, inside = divmod(row, coded.rows)
            rows = min(most, last - row, coded.rows - inside)
            try:
                values = coded.decode(self._reader, matrix, inside, inside + rows).to(dtype).contiguous()
            except IndexError as error:
                raise CheckpointError(f"{self.location}: tensor '{coded.name}' is damaged: {error}") from error
            first = row * width
            low, high = max(start, first), min(start + len(out), first + rows * width)
            out[low - start : high - start] = raw_bytes(values)[low - first : high - first]
            row += rows


def without_quantization(config: Config) -> Config:
    """A config without its entries about quantization, on any level that may have them.

    >>> without_quantization({"a": 1, "quantization_config": {"quant_method": "fp8"}})
    {'a': 1}
    """
    plain = {k: v for k, v in config.items() if k not in CONFIG_KEYS}
    return plain | {k: without_quantization(plain[k]) for k in LEVELS if isinstance(plain.get(k), Mapping)}
