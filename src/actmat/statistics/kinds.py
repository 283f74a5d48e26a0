"""Kinds of statistics: reading a file of them, and adding files up. `extras/collect` measures them.

`SumKind` covers kinds that store one sum per tensor.

Shapes: `G` groups of a convolution, `I` in_features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.errors import StatisticsError, did_you_mean
from actmat.statistics.header import GramInfo, GramOf, StatisticsHeader, SumInfo

Mean = Literal["token", "sample", "sum"]
"""Divisor of a Gram matrix: the tokens seen, the samples, or 1."""

BLOCK = 128
"""Rows of one block of a Gram's triangle: at I = 1024, 9/16 of the full product; large enough for a fast product."""

Part = tuple[int | None, tuple[int, ...] | None]
"""Expert and output features of a `GramOf`."""


class File(Protocol):
    """An open statistics file."""

    location: str
    header: StatisticsHeader


class Kind(ABC):
    """Declaration of a kind of statistics."""

    name: str  # its name, as in a method's `needs_statistics`; stored tensors are called `name.KEY`

    @abstractmethod
    def add_up(self, headers: Sequence[StatisticsHeader], hashes: Mapping[str, str]) -> dict[str, Any]:
        """Fields of the header of added files, given the hashes of the added tensors."""

    @abstractmethod
    def read(self, header: StatisticsHeader, key: str, stored: Tensor, mean: Mean) -> Tensor:
        """The statistic that the stored tensor `name.KEY` holds, which may be overwritten."""

    @abstractmethod
    def summary(self, header: StatisticsHeader) -> str:
        """A phrase on the content of a file, empty if it has none of this kind."""

    def problems(self, header: StatisticsHeader, specs: Mapping[str, TensorSpec]) -> Iterable[str]:
        """Disagreements between the header and the stored tensors."""
        return ()

    def conflicts(self, first: File, other: File) -> Iterable[str]:
        """Reasons why two files of one model cannot be added up."""
        return ()


class SumKind(Kind):
    """A kind that stores one sum per tensor of the checkpoint; `noun` is its name in summaries."""

    def __init__(self, name: str, noun: str = "") -> None:
        self.name = name
        self._noun = noun or name

    def info(self, header: StatisticsHeader) -> SumInfo | None:
        """The header's record of this kind; None if the file has none."""
        return header.others.get(self.name)

    def fields(self, info: SumInfo) -> dict[str, Any]:
        """The header's fields for a record."""
        return {"others": {self.name: info}}

    def add_up(self, headers: Sequence[StatisticsHeader], hashes: Mapping[str, str]) -> dict[str, Any]:
        """Counts add; the tensors of all files are listed."""
        infos = [i for h in headers if (i := self.info(h)) is not None]
        if not infos:
            return {}
        tensors = {n: hashes[f"{self.name}.{n}"] for i in infos for n in i.tensors}
        count = sum(i.count for i in infos)
        return self.fields(SumInfo(count=count, tensors=tensors, details=infos[0].details))

    def read(self, header: StatisticsHeader, key: str, stored: Tensor, mean: Mean) -> Tensor:
        """The mean over the count."""
        info = self.info(header)
        assert info is not None, "the tensor is listed"
        return stored.div_(max(info.count, 1))

    def summary(self, header: StatisticsHeader) -> str:
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


class _Fisher(SumKind):
    """The Fisher has fields of its own in the header."""

    def info(self, header: StatisticsHeader) -> SumInfo | None:
        if not header.fisher:
            return None
        return SumInfo(count=header.fisher_samples, tensors=header.fisher, details={"labels": header.fisher_labels})

    def fields(self, info: SumInfo) -> dict[str, Any]:
        labels = info.details["labels"]
        return {"fisher": info.tensors, "fisher_samples": info.count, "fisher_labels": labels}


def packed_size(width: int) -> int:
    """Entries of the lower triangle of an `I x I` matrix."""
    return width * (width + 1) // 2


def packed_shape(width: int, groups: int) -> tuple[int, ...]:
    """Shape of a stored Gram: `I(I+1)/2`, or `G I(I+1)/2`."""
    return (packed_size(width),) if groups == 1 else (groups, packed_size(width))


def unpack(packed: Tensor, width: int) -> Tensor:
    """The full symmetric `*batch I I` of `*batch I(I+1)/2`."""
    full = packed.new_empty(*packed.shape[:-1], width, width)
    for i in range(width):
        full[..., i, : i + 1] = packed[..., packed_size(i) : packed_size(i + 1)]
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        corner = full[..., start:stop, start:stop]
        corner.copy_(corner.tril() + corner.tril(-1).mT)
        full[..., start:stop, stop:] = full[..., stop:, start:stop].mT
    return full


class _Gram(Kind):
    """Gram matrices of layer inputs, and look-ups of tables.

    The packed form lists the lower triangle row by row: entry `(i, j)`, `j <= i`, lies at `i (i + 1) / 2 + j`.
    """

    name = "gram"

    def add_up(self, headers: Sequence[StatisticsHeader], hashes: Mapping[str, str]) -> dict[str, Any]:
        grams: dict[str, GramInfo] = {}
        for key in {k: None for h in headers for k in h.grams}:
            found = [h.grams[key] for h in headers if key in h.grams]
            update = {"rows": sum(g.rows for g in found), "hash": hashes[f"gram.{key}"]}
            grams[key] = found[0].model_copy(update=update)
        places: dict[str, list[GramOf]] = {}
        for name in sorted({n for h in headers for n in h.places}):
            parts = {k: v for h in headers for k, v in _by_part(h, name).items()}
            places[name] = [GramOf(gram=g, expert=e, rows=list(r) if r else None) for (e, r), g in parts.items()]
        stacks = {k: None for h in headers for k in h.stacks}
        counts = {n: hashes[f"counts.{n}"] for h in headers for n in h.counts}
        return {
            "grams": grams,
            "places": places,
            "stacks": {n: sum(h.stacks.get(n, 0) for h in headers) for n in stacks},
            "absent": {n: w for h in headers for n, w in h.absent.items() if n not in places and n not in counts},
            "counts": counts,
        }

    def read(self, header: StatisticsHeader, key: str, stored: Tensor, mean: Mean) -> Tensor:
        info = header.grams[key]
        # an expert of a mixture: the mean is over all tokens that came to its router
        tokens = info.rows if info.stack is None else header.stacks[info.stack]
        divisor = {"token": tokens, "sample": header.samples, "sum": 1}[mean]
        return unpack(stored.div_(max(divisor, 1)), info.width)

    def summary(self, header: StatisticsHeader) -> str:
        return f"{len(header.grams)} Gram matrices for {len(header.places)} tensors" if header.grams else ""

    def problems(self, header: StatisticsHeader, specs: Mapping[str, TensorSpec]) -> Iterator[str]:
        for key, info in header.grams.items():
            spec, shape = specs.get(f"gram.{key}"), packed_shape(info.width, info.groups)
            if spec is not None and (spec.shape != shape or spec.dtype not in ("float32", "float64")):
                found = f"{'x'.join(map(str, spec.shape))} {spec.dtype}"
                yield f"tensor 'gram.{key}': expected {'x'.join(map(str, shape))} floats, found {found}"
            if info.stack is not None and info.stack not in header.stacks:
                yield f"'{key}' is of the stack '{info.stack}', which is not listed"
        for name, parts in header.places.items():
            for part in parts:
                if part.gram not in header.grams:
                    yield f"'{name}' reads '{part.gram}', which is not there"
                if part.rows is not None and part.rows[0] >= part.rows[1]:
                    yield f"'{name}': rows {part.rows} are no range"

    def conflicts(self, first: File, other: File) -> Iterator[str]:
        for name in first.header.places.keys() & other.header.places.keys():
            mine, theirs = _by_part(first.header, name), _by_part(other.header, name)
            if any(mine[k] != theirs[k] for k in mine.keys() & theirs.keys()):
                yield f"'{name}' shares its Gram with other layers in {other.location} than elsewhere"


def _by_part(header: StatisticsHeader, name: str) -> dict[Part, str]:
    """Part of a stored tensor -> key of its Gram."""
    return {(p.expert, tuple(p.rows) if p.rows else None): p.gram for p in header.places.get(name, [])}


GRAM = _Gram()
FISHER = _Fisher("fisher", noun="Fisher")
KINDS: dict[str, Kind] = {kind.name: kind for kind in (GRAM, FISHER)}
"""Name -> kind."""


def get_kind(name: str) -> Kind:
    """The kind of this name, or an error that lists all."""
    if name not in KINDS:
        known = ", ".join(KINDS)
        raise StatisticsError(f"Unknown kind of statistics '{name}'; known are {known}.{did_you_mean(name, KINDS)}")
    return KINDS[name]


def added_fields(fields: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of the header from those of several kinds."""
    listed = list(fields)
    others = {kind: info for f in listed for kind, info in f.get("others", {}).items()}
    return {k: v for f in listed for k, v in f.items()} | {"others": others}
