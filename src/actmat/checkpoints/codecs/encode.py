"""Writing of codes: merged floats are encoded run by run, decoded again by the reader's own code, and measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.codecs.base import CodedTensor, StoredParts, count
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.raw import raw_bytes

BYTES_PER_ENTRY = 40
"""Memory while a run is encoded: its floats, their codes and scales on the way, and the decoded floats."""


class _Sink(Protocol):
    @property
    def digest(self) -> str: ...

    def write(self, data: memoryview) -> None: ...


def encoding_bytes(coded: CodedTensor) -> int:
    """Memory that encoding a tensor takes."""
    return min(coded.granule * coded.columns, count(coded.shape)) * BYTES_PER_ENTRY


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
