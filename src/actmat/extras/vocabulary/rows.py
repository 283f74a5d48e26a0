"""A checkpoint whose token tables have rows from several checkpoints, chosen by row number.

A new table is a list of runs: consecutive rows of one checkpoint, the mean of single rows of several, zeros, or the
mean of the table itself (for padding). Only requested rows are read.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import (
    Checkpoint,
    CheckpointHandle,
    FileIdentity,
    TensorSpec,
    torch_dtype,
)
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.side_files import ModelFiles, SideFiles

OWN_MEAN = ((-1, -1),)
"""Marks a row that is the mean of the table's other rows."""

BLOCK_ROWS = 4096
"""Number of rows read at a time to compute a table's mean."""

Sources = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows from `start` of a table: consecutive ones of a source, a mean, or zeros; see `TokenRowsCheckpoint`."""

    start: int
    count: int
    sources: tuple[tuple[int, int], ...]  # number of a checkpoint, and the first row there


@dataclass(frozen=True, slots=True)
class RowsHandle:
    """Tables made of rows of several checkpoints, as plain data; see `TokenRowsCheckpoint`."""

    own: CheckpointHandle
    sources: tuple[CheckpointHandle, ...]
    tables: tuple[tuple[str, tuple[str, ...]], ...]
    runs: tuple[RowRun, ...]

    @classmethod
    def of(cls, data: RowsHandle | Mapping[str, Any]) -> RowsHandle:
        """The handle itself, or rebuilt from `dataclasses.asdict` and JSON."""
        if isinstance(data, cls):
            return data
        assert isinstance(data, Mapping)
        return cls(
            CheckpointHandle(**data["own"]),
            tuple(CheckpointHandle(**s) for s in data["sources"]),
            tuple((n, tuple(t)) for n, t in data["tables"]),
            tuple(RowRun(r["start"], r["count"], tuple((k, row) for k, row in r["sources"])) for r in data["runs"]),
        )


def joined_runs(rows: Iterable[Sources]) -> tuple[RowRun, ...]:
    """Group the rows of a table into runs; each row's sources are pairs (checkpoint number, row).

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
    """True if a row continues a run: the next row of the same checkpoint, or zeros, or the same mean."""
    if len(run.sources) != 1 or len(sources) != 1 or run.sources == OWN_MEAN:
        return (run.sources == sources and len(sources) != 1) or run.sources == sources == OWN_MEAN
    (k, row), (other, next_row) = run.sources[0], sources[0]
    return k == other >= 0 and next_row == row + run.count


@dataclass(frozen=True)
class TableContext:
    """Files and notes of a checkpoint with new tables.

    Args:
        config: config of the new model; None for the checkpoint's own.
        sidecars: name -> text of files written to an output in place of copies.
        identity: identity of files other than weights that affect the result, such as tokenizers.
        notes: notes on the rows, for plans.
    """

    config: Mapping[str, Any] | None = None
    sidecars: Mapping[str, str] = field(default_factory=dict)
    identity: tuple[FileIdentity, ...] = ()
    notes: tuple[str, ...] = ()


class TokenRowsCheckpoint(Checkpoint):
    """A checkpoint whose tables are made of rows of several checkpoints.

    Args:
        own: source of all other tensors, and of the tables' names and dtypes.
        sources: source checkpoints of the rows, including `own`.
        tables: name of a table of `own` -> its name in each source (empty if a source lacks it).
        runs: table -> its runs.
        around: files and notes that belong to the new tables.
        owned: close the sources with this checkpoint.
    """

    def __init__(
        self,
        own: Checkpoint,
        sources: Sequence[Checkpoint],
        tables: Mapping[str, Sequence[str]],
        runs: Sequence[RowRun],
        *,
        around: TableContext | None = None,
        owned: bool = False,
    ) -> None:
        self._own, self._sources, self._tables = own, list(sources), {n: tuple(t) for n, t in tables.items()}
        self._runs, self._starts = tuple(runs), [r.start for r in runs]
        self.n_rows = runs[-1].start + runs[-1].count if runs else 0
        first = self._runs[0] if self._runs else RowRun(0, 0, ())
        is_own = len(first.sources) == 1 and first.sources[0][1] == 0 and sources[first.sources[0][0]] is own
        self.keeps_rows = is_own and all(own.specs[n].shape[0] <= first.count for n in tables)
        around = around or TableContext()
        self._config, self._identity, self._owned = around.config, around.identity, owned
        self.written_sidecars = around.sidecars
        self.location, self.directory, self.aliases = own.location, own.directory, own.aliases
        self.notes = (*own.notes, *around.notes)
        self.specs = MappingProxyType(
            {n: replace(s, shape=(self.n_rows, *s.shape[1:])) if n in self._tables else s for n, s in own.specs.items()}
        )
        self._means: dict[str, Tensor] = {}

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Config of the new model."""
        return self._own.config if self._config is None else self._config

    @property
    def written_config(self) -> Mapping[str, Any] | None:
        """The config, unless it is copied."""
        return self._own.written_config if self._config is None else self._config

    def scheme(self, name: str) -> str:
        """The checkpoint's scheme."""
        return self._own.scheme(name)

    def stored_bytes(self, name: str) -> int:
        """Stored bytes in the checkpoint; for a table, its size."""
        return self.specs[name].nbytes if name in self._tables else self._own.stored_bytes(name)

    def sources(self) -> tuple[ModelFiles, ...]:
        """Those of the checkpoint."""
        return self._own.sources()

    def side_files(self) -> SideFiles:
        """Those of the checkpoint."""
        return self._own.side_files()

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the weight files, and of the files that determine the rows."""
        return (*self._own.identity(), *self._identity)

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Fill with the tensor's bytes; for a table, from the sources of its rows."""
        if spec.name not in self._tables:
            self._own.read_into(spec.name, start, out)
            return
        width = math.prod(spec.shape[1:]) * spec.itemsize
        done = 0
        while done < len(out):
            run = self._runs[bisect_right(self._starts, (start + done) // width) - 1]
            inside = start + done - run.start * width
            size = min(len(out) - done, run.count * width - inside)
            self._fill_run(spec, run, inside, out[done : done + size])
            done += size

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on."""
        self._own.prefetch(names)

    @property
    def buffer_bytes(self) -> int:
        """Sum over all sources, because each may read ahead."""
        return sum(c.buffer_bytes for c in {id(c): c for c in (self._own, *self._sources)}.values())

    def handle(self) -> CheckpointHandle:
        """Handle of the checkpoint, with the handles of the sources and the runs."""
        rows = RowsHandle(
            self._own.handle(),
            tuple(c.handle() for c in self._sources),
            tuple((n, t) for n, t in self._tables.items()),
            self._runs,
        )
        return CheckpointHandle(rows.own.address, "vocabulary", self.location, view=rows)

    def fetch_sidecars(self) -> Path | None:
        """Local folder of config, tokenizer and processor files."""
        return self._own.fetch_sidecars()

    def close(self) -> None:
        """Close the checkpoint, and the sources if it owns them."""
        self._own.close()
        for checkpoint in self._sources if self._owned else ():
            checkpoint.close()

    def _fill_run(self, spec: TensorSpec, run: RowRun, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a run, starting at its byte `start`."""
        if len(run.sources) == 1 and run.sources != OWN_MEAN:
            ((k, row),) = run.sources
            name = self._tables[spec.name][k]
            if self._sources[k].specs[name].dtype == spec.dtype:
                width = math.prod(spec.shape[1:]) * spec.itemsize
                self._sources[k].read_into(name, row * width + start, out)
                return
        width = math.prod(spec.shape[1:]) * spec.itemsize
        first, last = start // width, -(-(start + len(out)) // width)
        for number in range(first, last):
            data = raw_bytes(self._row(spec, run, number).to(torch_dtype(spec.dtype)).contiguous())
            low, high = max(start, number * width), min(start + len(out), (number + 1) * width)
            out[low - start : high - start] = data[low - number * width : high - number * width]

    def _row(self, spec: TensorSpec, run: RowRun, number: int) -> Tensor:
        """Row `number` of a run: zeros, a row, or a mean, which is computed in float64."""
        if run.sources == OWN_MEAN:
            return self._own_mean(spec)
        found = [
            self._source_row(spec.name, k, row + (number if len(run.sources) == 1 else 0)) for k, row in run.sources
        ]
        if len(found) == 1:
            return found[0]
        total = torch.zeros(spec.shape[1:] or (1,), dtype=torch.float64)
        for row in found:
            total += row.double().view(total.shape)
        return total / max(1, len(found))

    def _source_row(self, table: str, k: int, row: int) -> Tensor:
        name = self._tables[table][k]
        spec = self._sources[k].specs[name]
        out = torch.empty(spec.shape[1:] or (1,), dtype=torch_dtype(spec.dtype))
        data = raw_bytes(out)
        self._sources[k].read_into(name, row * len(data), data)
        return out

    def _own_mean(self, spec: TensorSpec) -> Tensor:
        """Mean of all rows of a table except the rows that hold this mean."""
        if spec.name not in self._means:
            total, count = torch.zeros(spec.shape[1:] or (1,), dtype=torch.float64), 0
            width = math.prod(spec.shape[1:]) * spec.itemsize
            for run in (r for r in self._runs if r.sources != OWN_MEAN):
                for low in range(0, run.count, BLOCK_ROWS):
                    rows = min(BLOCK_ROWS, run.count - low)
                    block = torch.empty(rows, *(spec.shape[1:] or (1,)), dtype=torch_dtype(spec.dtype))
                    self.read_into(spec.name, (run.start + low) * width, raw_bytes(block))
                    total += block.double().sum(0)
                    count += rows
            self._means[spec.name] = total / max(1, count)
        return self._means[spec.name]
