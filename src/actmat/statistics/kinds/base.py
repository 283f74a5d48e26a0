"""Contract of a kind of statistics.

A kind is declared once: how it is accumulated, what is stored, how files are added up, how a stored tensor is read.
`SumKind` covers kinds that store one sum per tensor; `gram.py` and `fisher.py` are the examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from actmat.checkpoints.base import TensorSpec
from actmat.extras.collect.batches import Batch
from actmat.extras.collect.settings import FLOATS, Settings
from actmat.statistics.binding import Binding, content_hash
from actmat.statistics.header import Header, SumInfo

__all__ = ["Accumulator", "File", "Kind", "Mean", "Run", "StoredTensors", "SumKind", "Sums", "added_fields"]

Mean = Literal["token", "sample", "sum"]
"""Divisor of a Gram matrix: the tokens seen, the samples, or 1."""


@dataclass(frozen=True)
class Run:
    """A model to be measured, its binding to a checkpoint, and the settings of the measurement."""

    model: nn.Module
    binding: Binding
    settings: Settings


class Accumulator(Protocol):
    """Running sums of one kind over batches."""

    def add(self, batch: Batch) -> None:
        """Add a batch."""

    def close(self) -> None:
        """Remove hooks from the model, also after an error."""


class File(Protocol):
    """An open statistics file."""

    location: str
    header: Header


class StoredTensors:
    """Tensors to store: their specs, and functions that compute their values; floating-point ones in `dtype`."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.specs: list[TensorSpec] = []
        self.make: dict[str, Callable[[], Tensor]] = {}

    def add(self, name: str, shape: Sequence[int], make: Callable[[], Tensor], dtype: str | None = None) -> str:
        """Add a tensor, which `make` computes whenever it is asked for; return the hash of its bytes."""
        self.specs.append(TensorSpec(name, tuple(shape), dtype or self.dtype, ""))
        self.make[name] = make
        return content_hash(make())


A = TypeVar("A", bound=Accumulator)


class Kind(ABC, Generic[A]):
    """Declaration of a kind of statistics."""

    name: str  # its name, as in a method's `needs_statistics`; stored tensors are called `name.KEY`

    @abstractmethod
    def start(self, run: Run) -> A:
        """Start to measure a model."""

    @abstractmethod
    def store(self, measured: A, run: Run, out: StoredTensors) -> dict[str, Any]:
        """Add what was measured to the tensors to store; return its fields of the header."""

    @abstractmethod
    def add_up(self, headers: Sequence[Header], hashes: Mapping[str, str]) -> dict[str, Any]:
        """Fields of the header of added files, given the hashes of the added tensors."""

    @abstractmethod
    def read(self, header: Header, key: str, stored: Tensor, mean: Mean) -> Tensor:
        """The statistic that the stored tensor `name.KEY` holds, which may be overwritten."""

    @abstractmethod
    def summary(self, header: Header) -> str:
        """A phrase on the content of a file, empty where it has none of this kind."""

    def problems(self, header: Header, specs: Mapping[str, TensorSpec]) -> Iterable[str]:
        """Disagreements between the header and the stored tensors."""
        return ()

    def conflicts(self, first: File, other: File) -> Iterable[str]:
        """Reasons why two files of one model cannot be added up."""
        return ()


@dataclass(frozen=True)
class Sums:
    """Totals of an accumulator."""

    count: int  # divisor of the mean
    tensors: Mapping[str, Tensor]  # name of a stored tensor -> sum
    details: Mapping[str, str] = field(default_factory=dict)  # settings that must agree in files that are added up


class _Summing(Accumulator, Protocol):
    def totals(self) -> Sums: ...


B = TypeVar("B", bound=_Summing)


class SumKind(Kind[B]):
    """A kind that stores one sum per tensor of the checkpoint.

    `start` makes the accumulator, which has `add`, `close` and `totals`; `noun` is the name in summaries.
    """

    def __init__(self, name: str, start: Callable[[Run], B], noun: str = "") -> None:
        self.name = name
        self._start = start
        self._noun = noun or name

    def start(self, run: Run) -> B:
        """Start to measure a model."""
        return self._start(run)

    def info(self, header: Header) -> SumInfo | None:
        """The header's record of this kind; None where the file has none."""
        return header.others.get(self.name)

    def fields(self, info: SumInfo) -> dict[str, Any]:
        """The header's fields for a record."""
        return {"others": {self.name: info}}

    def store(self, measured: B, run: Run, out: StoredTensors) -> dict[str, Any]:
        """Store the sums as they are."""
        found, dtype = measured.totals(), FLOATS[run.settings.dtype]
        hashes = {
            name: out.add(f"{self.name}.{name}", value.shape, partial(_stored, value, dtype))
            for name, value in found.tensors.items()
        }
        return self.fields(SumInfo(count=found.count, tensors=hashes, details=dict(found.details)))

    def add_up(self, headers: Sequence[Header], hashes: Mapping[str, str]) -> dict[str, Any]:
        """Counts add; the tensors of all files are listed."""
        infos = [i for h in headers if (i := self.info(h)) is not None]
        if not infos:
            return {}
        tensors = {n: hashes[f"{self.name}.{n}"] for i in infos for n in i.tensors}
        count = sum(i.count for i in infos)
        return self.fields(SumInfo(count=count, tensors=tensors, details=infos[0].details))

    def read(self, header: Header, key: str, stored: Tensor, mean: Mean) -> Tensor:
        """The mean over the count."""
        info = self.info(header)
        assert info is not None, "the tensor is listed"
        return stored.div_(max(info.count, 1))

    def summary(self, header: Header) -> str:
        """For example: `the Fisher of 15 tensors (drawn labels)`."""
        info = self.info(header)
        if info is None or not info.tensors:
            return ""
        details = ", ".join(f"{value} {key}" for key, value in info.details.items())
        return f"the {self._noun} of {len(info.tensors)} tensors" + (f" ({details})" if details else "")

    def conflicts(self, first: File, other: File) -> Iterator[str]:
        """Details differ."""
        mine, theirs = self.info(first.header), self.info(other.header)
        if mine is not None and theirs is not None and mine.details != theirs.details:
            names = " and ".join(sorted(mine.details | theirs.details))
            yield f"{other.location} took {names} for the {self._noun} from elsewhere than {first.location}"


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).contiguous()


def added_fields(fields: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of the header from those of several kinds."""
    listed = list(fields)
    others = {kind: info for f in listed for kind, info in f.get("others", {}).items()}
    return {k: v for f in listed for k, v in f.items()} | {"others": others}
