"""Tensors whose rows are rows of other tensors: one checkpoint read in the layout of another, without a copy.

Packed projections that the other layout stores apart, halves in another order and renamed tensors are all ranges of
rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, TensorSpec
from actmat.checkpoints.view import CheckpointView


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `start` to `stop - 1` of the tensor `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A tensor made of ranges of rows, in order.

    `columns`: entries of a row in a stack, where one index of the first axis holds several rows.
    """

    ranges: tuple[RowRange, ...]
    columns: int = 0


class RowsCheckpoint(CheckpointView):
    """A checkpoint in another layout.

    Args:
        inner: the stored one, closed with this.
        shapes: name in the other layout -> shape there.
        rows: name -> where its rows are stored; names that are missing are read as they are stored.
    """

    def __init__(
        self, inner: Checkpoint, shapes: Mapping[str, tuple[int, ...]], rows: Mapping[str, TensorRows]
    ) -> None:
        super().__init__(inner)
        self.rows = dict(rows)
        self.aliases = MappingProxyType({})
        used = {r.name for t in rows.values() for r in t.ranges}
        specs = {n: s for n, s in inner.specs.items() if n not in used and n not in rows}
        for name, parts in self.rows.items():
            first = inner.specs[parts.ranges[0].name]
            specs[name] = TensorSpec(name, shapes[name], first.dtype, first.file)
        self.specs = MappingProxyType(specs)

    def handle(self) -> CheckpointHandle:
        """Address of the stored checkpoint, with the rows."""
        return self.viewed(_opened, ({n: self.specs[n].shape for n in self.rows}, self.rows))

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Bytes of the tensor, in the other layout."""
        parts = self.rows.get(spec.name)
        if parts is None:
            self.inner.read_into(spec.name, start, out)
        else:
            self._read_rows(parts, start, out)

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on."""
        for name in names:
            parts = self.rows.get(name)
            self.inner.prefetch([name] if parts is None else dict.fromkeys(r.name for r in parts.ranges))

    def _read_rows(self, parts: TensorRows, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of the ranges, one below the other."""
        ranges = parts.ranges
        first = self.inner.specs[ranges[0].name]
        width = parts.columns * first.itemsize or first.nbytes // (first.shape[0] if first.shape else 1)
        ends = list(accumulate((r.stop - r.start) * width for r in ranges))
        done, k = 0, bisect_right(ends, start)
        while done < len(out):
            one = ranges[k]
            inside = start + done - (ends[k] - (one.stop - one.start) * width)
            size = min(len(out) - done, ends[k] - start - done)
            self.inner.read_into(one.name, one.start * width + inside, out[done : done + size])
            done += size
            k += 1


def _opened(inner: Checkpoint, data: tuple[Mapping[str, tuple[int, ...]], Mapping[str, TensorRows]]) -> RowsCheckpoint:
    return RowsCheckpoint(inner, *data)
