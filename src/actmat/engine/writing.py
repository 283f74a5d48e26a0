"""The one writer of merged values: rounds once, checks range, sign and finiteness, hashes.

A kernel gives merged deltas to the `Output` of its task. `TensorOutput` adds them to the base and writes the sum chunk
by chunk; `kernels.extracted` keeps them for a decomposition. `write_tensor` writes values that have no base.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec, torch_dtype
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.observer import Sink, SinkSource
from actmat.engine.reader import StreamedBase, TensorReader
from actmat.engine.size import Sample
from actmat.errors import NumericalError
from actmat.layout.classify import is_variance
from actmat.planning.item import Item
from actmat.planning.regions import CHUNK, Region


def rounded(spec: TensorSpec, value: Tensor) -> Tensor:
    """A whole tensor in the dtype of its spec.

    Raises:
        NumericalError: NaN, Inf, or values beyond the range of the dtype.
    """
    dtype = torch_dtype(spec.dtype)
    out = value.to(dtype).contiguous()
    if not bool(torch.isfinite(out).all()):
        raise NumericalError(
            f"tensor '{spec.name}' has values beyond {dtype}'s range; write with --dtype bfloat16 or float32"
            if bool(torch.isfinite(value).all())
            else f"tensor '{spec.name}' has NaN or Inf, but its factors are finite. Likely cause: options out of "
            "proportion to the deltas; try other options, or another method for this module"
        )
    return out


def write_tensor(writer: SinkSource, spec: TensorSpec, value: Tensor) -> str:
    """Round and write a whole tensor; returns its content hash.

    Raises:
        NumericalError: see `rounded`.
    """
    sink = writer.sink(spec.name)
    sink.write(raw_bytes(rounded(spec, value)))
    return sink.digest


class Output(abc.ABC):
    """Receives the merged delta of one item, region by region in storage order.

    Attributes:
        sample: sampled entries of the merged delta, see `engine.size`.
    """

    def __init__(self, item: Item, writer: SinkSource) -> None:
        self.item = item
        self.writer = writer
        self.sample = Sample(item.numel)

    @property
    def scale(self) -> float:
        """Factor of the merged delta."""
        return self.item.call.scale if self.item.call is not None else 1.0

    @abc.abstractmethod
    def take(self, region: Region, base_raw: Tensor | StreamedBase, delta: Tensor | None, reader: TensorReader) -> None:
        """Take the merged delta of a region, flat, before its scale; None: nothing changed there."""

    @abc.abstractmethod
    def take_chunk(self, start: int, sum_S: Tensor, base_S: Tensor, stored_S: Tensor, reader: TensorReader) -> None:
        """Take the merged delta of a chunk from entry `start` on, which may be overwritten.

        Args:
            base_S: the base there in the compute dtype; `stored_S`: as stored.
        """

    @abc.abstractmethod
    def finish(self) -> Mapping[str, str]:
        """Content hash of every tensor that was written, once all regions were given."""

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """Content hash of all that was written, after `finish`."""

    @property
    def stats(self) -> Mapping[str, Any]:
        """Numbers for the record about the written tensor, after `finish`."""
        return {}


class TensorOutput(Output):
    """Writes `W_0 + scale * D*` in the output dtype; without a delta, the base's bits."""

    @cached_property
    def _sink(self) -> Sink:
        """Receives the bytes of the tensor, and of those tied to it."""
        return self.writer.sink(self._names[0], self._names[1:])

    @property
    def _names(self) -> tuple[str, ...]:
        """Name of the tensor in the output, and of those that get the same bytes."""
        if self.item.extraction is not None:
            return tuple(s.name for s in self.item.outputs)
        return (self.item.name, *self.item.aliases)

    def take(self, region: Region, base_raw: Tensor | StreamedBase, delta: Tensor | None, reader: TensorReader) -> None:
        """See `Output`."""
        if delta is None:
            for low in range(0, base_raw.numel(), CHUNK):
                chunk = base_raw[low : low + CHUNK]
                self._write(chunk, chunk, reader)
            return
        self.sample.add(region.start, delta, self.scale)
        low = 0
        for chunk in reader.merged_chunks(region, base_raw, delta, self.scale):
            self._write(chunk, base_raw[low : low + chunk.numel()], reader)
            low += chunk.numel()

    def take_chunk(self, start: int, sum_S: Tensor, base_S: Tensor, stored_S: Tensor, reader: TensorReader) -> None:
        """See `Output`."""
        if start + sum_S.numel() > self.sample.runs.wanted_from:
            self.sample.add(start, sum_S, self.scale)
        self._write(torch.add(base_S, sum_S, alpha=self.scale, out=sum_S), stored_S, reader)

    def finish(self) -> Mapping[str, str]:
        """See `Output`."""
        return dict.fromkeys(self._names, self._sink.digest)

    @property
    def digest(self) -> str:
        """See `Output`."""
        return self._sink.digest

    def _write(self, chunk: Tensor, base_raw: Tensor, reader: TensorReader) -> None:
        """Cast, check and write one chunk of merged entries; `base_raw`: the same of the base, as stored.

        Raises:
            NumericalError: from `check_range` and `check_sign`.
        """
        out_dtype = torch_dtype(self.item.out_dtype)
        cast = chunk
        if chunk.dtype != out_dtype:
            cast = reader.scratch.cast.take(chunk.numel(), out_dtype).copy_(chunk)
        # a sum is finite only if every entry is (or it overflows): one pass in the cache, an exact one only then
        if out_dtype.is_floating_point and not math.isfinite(float(cast.sum())):
            check_range(self.item, chunk, cast, base_raw)
        if is_variance(self.item.name):
            check_sign(self.item, cast, base_raw)
        self._sink.write(raw_bytes(cast))


def check_range(item: Item, value: Tensor, cast: Tensor, base_raw: Tensor) -> None:
    """Refuse entries that are not finite where the base's are; a mask of -inf in the base may stay one.

    Args:
        value: merged entries; `cast`: the same in the output dtype.

    Raises:
        NumericalError: there are such entries.
    """
    lost = torch.isfinite(base_raw) & ~torch.isfinite(cast)
    if not bool(lost.any()):
        return
    largest = f"{item.out_dtype}'s range ({torch.finfo(cast.dtype).max:g})"
    how = f"after merging with '{item.call.method}'" if item.call else "in the base"
    found = float(value[lost][0])
    such = f", such as {found:g}" if math.isfinite(found) else ""
    wider = "bfloat16 or float32" if cast.dtype == torch.float16 else "float64"
    raise NumericalError(
        f"tensor '{item.name}' has values beyond {largest} {how}{such}; write with --dtype {wider}, or lower the scale"
    )


def check_sign(item: Item, cast: Tensor, base_raw: Tensor) -> None:
    """Refuse variances that are negative where the base's are not.

    Raises:
        NumericalError: there are such entries.
    """
    lost = (cast < 0) & (base_raw >= 0)
    if bool(lost.any()):
        how = f"after merging with '{item.call.method}'" if item.call else "in the base"
        raise NumericalError(
            f"tensor '{item.name}' holds variances, expected to be 0 or more, and has {float(cast[lost][0]):g} {how}; "
            "merge it with 'average' and weights of 0 or more, or keep the base's (--keep '*running_var')"
        )
