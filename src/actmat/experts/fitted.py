"""Adapters on their base as experts: tensors that were trained in full are stored, all other deltas are formed.

Shapes: `O` rows and `I` columns of a tensor as it is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.hashing import hash_names
from actmat.errors import CheckpointError
from actmat.experts.deltas import Deltas, DeltaSource
from actmat.experts.lora.adapter import Adapter, AdapterHandle
from actmat.experts.untied import TiedParts
from actmat.linalg.lowrank import LowRank

_SLAB = 1 << 20
"""Entries of a delta that are formed at a time."""
_PRODUCT_SLAB = 1 << 22
"""The same for a product of factors."""


@dataclass(frozen=True, slots=True)
class FormedPart:
    """The delta of one tensor of the base.

    Args:
        stored: names of the stored tensors that it is made of.
        rank: of a product of factors, else 0.
        form: the whole delta in a dtype, as the tensor is stored; a product if it has a rank.
        rows: gives a function that forms rows `first:last` in a dtype; None if only the whole can be formed.
    """

    stored: Sequence[str]
    rank: int
    form: Callable[[torch.dtype], Tensor | LowRank]
    rows: Callable[[torch.dtype], Callable[[int, int], Tensor]] | None = None


class FittedDeltas(Deltas):
    """An adapter on its base.

    Args:
        stored: the adapter, which is closed with it.
        tied: its base, see `tied_parts`; may be closed afterwards, unless deltas depend on it.
        formed: name in the base -> its delta.
        full: name in the base -> stored name of the tensor that replaces it.
        hidden: other names of tensors of the base.
        problems: of the adapter on this base.

    Raises:
        CheckpointError: there are problems.
    """

    needs_base = True
    stored: Adapter

    def __init__(
        self,
        stored: Adapter,
        tied: TiedParts,
        formed: Mapping[str, FormedPart],
        full: Mapping[str, str],
        hidden: Collection[str],
        problems: Sequence[str],
    ) -> None:
        super().__init__(replace(stored.model, folder=replace(stored.model.folder, untied=tied.heads)))
        if problems := [*tied.problems, *problems]:
            raise CheckpointError(
                f"{self.location}: the adapter cannot be merged into {tied.base.location}.",
                [f"{self.location}: {problem}" for problem in problems],
            )
        self.stored, self._base, self._formed = stored, tied.base, formed
        self._full = {name: n for name, n in full.items() if name not in tied.copies}
        specs = {name: spec for name, spec in tied.base.specs.items() if name not in hidden}
        for name, n in self._full.items():
            spec = self.model.specs[n]
            specs[name] = TensorSpec(name, spec.shape, spec.dtype, spec.file)
        self.specs = MappingProxyType(specs)
        self._lock = threading.Lock()
        self._last: tuple[str, torch.dtype, Tensor | LowRank] | None = None

    def source(self, name: str) -> DeltaSource:
        """Stored if it was trained in full, formed if the adapter changes it otherwise, else zero."""
        dtype, stored = self._spec(name).dtype, self.model.specs
        if name in self._full:
            return DeltaSource(name, "stored", dtype, stored[self._full[name]].nbytes)
        if (part := self._formed.get(name)) is None:
            return DeltaSource(name, "zero", dtype, 0)
        return DeltaSource(name, "formed", dtype, sum(stored[n].nbytes for n in part.stored), part.rank)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of a tensor that is stored whole."""
        if name not in self._full:
            self._refuse(name, "read")
        self.model.tensors.read_into(self._full[name], start, out)

    def dense(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Entries `start:stop` of the flattened delta of `name`; only the rows around them are formed, where possible.

        Of a product, the factors are kept until the next is asked for; a delta without rows is kept whole.
        """
        if self.source(name).kind != "formed":
            return super().dense(name, start, stop, dtype)
        if (rows_of := self._formed[name].rows) is None:
            whole = self._whole(name, dtype)
            return entries_of(whole, start, stop) if isinstance(whole, LowRank) else whole.flatten()[start:stop].clone()
        shape, rows = self.specs[name].shape, rows_of(dtype)
        columns = self.specs[name].numel // shape[0] if shape else 1
        out = torch.empty(stop - start, dtype=dtype)
        position = start
        while position < stop:
            first = position // columns
            last = min(first + max(1, _SLAB // columns), -(-stop // columns))
            position += _put(rows(first, last).flatten()[position - first * columns :], out, position - start)
        return out

    def factors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> LowRank:
        """The delta as a product, with a convolution's kernel flattened into `I`."""
        if not self.source(name).rank:
            return super().factors(name, shape, dtype)
        product = self._whole(name, dtype)
        assert isinstance(product, LowRank), "a delta with a rank"
        return product

    def _whole(self, name: str, dtype: torch.dtype) -> Tensor | LowRank:
        """The delta of a tensor; the last one is kept, as callers read it in parts."""
        with self._lock:
            if self._last is not None and self._last[:2] == (name, dtype):
                return self._last[2]
        value = self._formed[name].form(dtype)
        with self._lock:
            self._last = (name, dtype, value)
        return value

    def content(self, name: str) -> str:
        """Hash over the stored tensors of the delta; the hash of no data for a zero delta."""
        if self.source(name).kind == "stored":
            self._refuse(name, "formed")
        names = self._formed[name].stored if name in self._formed else ()
        return hash_names((n, self.stored.hashes[n]) for n in names)

    def handle(self) -> AdapterHandle:
        """That of the adapter with the address of the base, and of tables with the rows of another vocabulary."""
        handle, aligned = self.stored.handle(), self.model.tensors.handle() if self.stored.has_other_rows else None
        return replace(handle, base=self._base.tensors.handle(), config=self._base.config, weights=aligned)

    def close(self) -> None:
        """Close the adapter's files, and forget its last delta."""
        super().close()
        with self._lock:
            self._last = None


def entries_of(product: LowRank, start: int, stop: int) -> Tensor:
    """Entries `start:stop` of the flattened product; only the rows around them are formed, a slab at a time."""
    rows, columns = product.shape[-2:]
    out = torch.empty(stop - start, dtype=product.b_OR.dtype)
    position = start
    while position < stop:
        expert, inside = divmod(position, rows * columns)
        first = inside // columns
        last = min(rows, first + max(1, _PRODUCT_SLAB // columns), -(-(inside + stop - position) // columns))
        matrix = LowRank(product.b_OR[expert], product.a_RI[expert]) if product.b_OR.ndim == 3 else product
        slab = (matrix.b_OR[first:last] @ matrix.a_RI).flatten()
        position += _put(slab[inside - first * columns :], out, position - start)
    return out


def _put(values: Tensor, out: Tensor, position: int) -> int:
    """Copy the first values to `out` from a position on, as many as fit; their number."""
    count = min(values.numel(), out.numel() - position)
    out[position : position + count] = values[:count]
    return count
