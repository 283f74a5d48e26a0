"""Tensors whose token tables have rows from several models, chosen by row number.

A new table is a list of runs: consecutive rows of one model, the mean of single rows of several, zeros, or the
mean of the table itself (for padding). Only requested rows are read.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from actmat.checkpoints.base import FileIdentity, Tensors, TensorSpec, View, torch_dtype
from actmat.checkpoints.raw import raw_bytes

OWN_MEAN = ((-1, -1),)
"""Marks a row that is the mean of the table's other rows."""

BLOCK_ROWS = 4096
"""Number of rows read at a time to compute a table's mean."""

Sources = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows from `start` of a table: consecutive ones of a source, a mean, or zeros; see `TokenRows`."""

    start: int
    count: int
    sources: tuple[tuple[int, int], ...]  # number of a lender, and the first row there


def joined_runs(rows: Iterable[Sources]) -> tuple[RowRun, ...]:
    """Group the rows of a table into runs; each row's sources are pairs (number of a lender, row).

    >>> joined_runs([((0, 5),), ((0, 6),), (), ((0, 1), (1, 1))])
    (RowRun(start=0, count=2, sources=((0, 5),)), RowRun(start=2, count=1, sources=()), RowRun(start=3, count=1, \
sources=((0, 1), (1, 1))))
    """
    runs: list[RowRun] = []
    for number, sources in enumerate(rows):
        last = runs[-1] if runs else None
        if last is not None and _follows(last, sources):
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(RowRun(number, 1, sources))
    return tuple(runs)


def _follows(run: RowRun, sources: Sources) -> bool:
    """True if a row continues a run: the next row of the same lender, or zeros, or the same mean."""
    if len(run.sources) != 1 or len(sources) != 1 or run.sources == OWN_MEAN:
        return (run.sources == sources and len(sources) != 1) or run.sources == sources == OWN_MEAN
    (k, row), (other, next_row) = run.sources[0], sources[0]
    return k == other >= 0 and next_row == row + run.count


class TokenRows(View):
    """Tensors of a model whose tables are made of rows of several models; closes all of them.

    Args:
        sources: the stored tensors, for all others and for the tables' names and dtypes; then those that lend rows, the
            stored ones among them.
        tables: name of a stored table -> its name in each lender (empty if one lacks it).
        runs: of every table.
        tokenizers: identity of files other than weights that affect the result.
    """

    def __init__(
        self,
        sources: Sequence[Tensors],
        tables: Mapping[str, tuple[str, ...]],
        runs: Sequence[RowRun],
        tokenizers: tuple[FileIdentity, ...] = (),
    ) -> None:
        super().__init__(sources, tables, runs, tokenizers)
        stored, *self._lenders = sources
        self._stored, self._tables = stored, tables
        self._runs, self._starts, self._tokenizers = tuple(runs), [r.start for r in runs], tokenizers
        self.n_rows = runs[-1].start + runs[-1].count if runs else 0
        self.aliases = stored.aliases
        self.specs = MappingProxyType(
            {n: replace(s, shape=(self.n_rows, *s.shape[1:])) if n in tables else s for n, s in stored.specs.items()}
        )
        self._means: dict[str, Tensor] = {}

    def parts(self, name: str) -> tuple[tuple[TensorSpec, ...], str]:
        """Those of the stored tensor; a table is itself."""
        return super().parts(name) if name in self._tables else self._stored.parts(name)

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the weight files, and of the files that determine the rows."""
        return (*self._stored.identity(), *self._tokenizers)

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Fill with the tensor's bytes; for a table, from the lenders of its rows."""
        if spec.name not in self._tables:
            self._stored.read_into(spec.name, start, out)
            return
        width, done = _width(spec), 0
        while done < len(out):
            run = self._runs[bisect_right(self._starts, (start + done) // width) - 1]
            inside = start + done - run.start * width
            size = min(len(out) - done, run.count * width - inside)
            self._fill_run(spec, run, inside, out[done : done + size])
            done += size

    def _fill_run(self, spec: TensorSpec, run: RowRun, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a run, starting at its byte `start`."""
        if len(run.sources) == 1 and run.sources != OWN_MEAN:
            ((k, row),) = run.sources
            name = self._tables[spec.name][k]
            if self._lenders[k].specs[name].dtype == spec.dtype:
                self._lenders[k].read_into(name, row * _width(spec) + start, out)
                return
        width = _width(spec)
        first, last = start // width, -(-(start + len(out)) // width)
        for number in range(first, last):
            data = raw_bytes(self._row(spec, run, number).to(torch_dtype(spec.dtype)).contiguous())
            low, high = max(start, number * width), min(start + len(out), (number + 1) * width)
            out[low - start : high - start] = data[low - number * width : high - number * width]

    def _row(self, spec: TensorSpec, run: RowRun, number: int) -> Tensor:
        """Row `number` of a run: zeros, a row, or a mean, which is computed in float64."""
        if run.sources == OWN_MEAN:
            return self._own_mean(spec)
        rows = [
            self._source_row(spec.name, k, row + (number if len(run.sources) == 1 else 0)) for k, row in run.sources
        ]
        if len(rows) == 1:
            return rows[0]
        total = torch.zeros(spec.shape[1:] or (1,), dtype=torch.float64)
        for row in rows:
            total += row.double().view(total.shape)
        return total / max(1, len(rows))

    def _source_row(self, table: str, k: int, row: int) -> Tensor:
        name = self._tables[table][k]
        spec = self._lenders[k].specs[name]
        out = torch.empty(spec.shape[1:] or (1,), dtype=torch_dtype(spec.dtype))
        data = raw_bytes(out)
        self._lenders[k].read_into(name, row * len(data), data)
        return out

    def _own_mean(self, spec: TensorSpec) -> Tensor:
        """Mean of all rows of a table except the rows that hold this mean."""
        if spec.name not in self._means:
            total, count = torch.zeros(spec.shape[1:] or (1,), dtype=torch.float64), 0
            for run in (r for r in self._runs if r.sources != OWN_MEAN):
                for low in range(0, run.count, BLOCK_ROWS):
                    rows = min(BLOCK_ROWS, run.count - low)
                    block = torch.empty(rows, *(spec.shape[1:] or (1,)), dtype=torch_dtype(spec.dtype))
                    self.read_into(spec.name, (run.start + low) * _width(spec), raw_bytes(block))
                    total += block.double().sum(0)
                    count += rows
            self._means[spec.name] = total / max(1, count)
        return self._means[spec.name]


def _width(spec: TensorSpec) -> int:
    """Bytes of a row."""
    return math.prod(spec.shape[1:]) * spec.itemsize
