"""An adapter as an expert among full checkpoints: the base's tensors, with deltas where the adapter has them.

Shapes: `O` rows and `I` columns of a tensor as it is stored, `R` rank, `E` stacked experts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import Tensor

from actmat.checkpoints.adapter import Adapter, AdapterModule
from actmat.checkpoints.base import Checkpoint, FileIdentity, TensorSpec
from actmat.checkpoints.hashing import hash_names
from actmat.linalg.lowrank import LowRank

__all__ = ["AdapterExpert", "Piece", "is_formed"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The delta of one stored tensor: that of a module, its expert `index`, its rows `start:stop`, transposed or not.

    `bias`: what the module adds to its layer's bias instead.
    """

    module: AdapterModule
    transposed: bool = False
    index: int | None = None
    start: int = 0
    stop: int | None = None
    bias: bool = False


class AdapterExpert(Checkpoint):
    """`W_0 + scaling * B A` without the sum: `delta` gives the deltas, only tensors trained in full have bytes.

    Args:
        adapter: what is added.
        base: what it is added to.
        pieces: stored name in the base -> its delta.
        full: stored name in the base -> stored name in the adapter, for tensors trained in full.
        hidden: names of the base that this expert does not show (tied names beside the one that has the delta).
    """

    def __init__(
        self,
        adapter: Adapter,
        base: Checkpoint,
        pieces: Mapping[str, Piece],
        full: Mapping[str, str],
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self.adapter = adapter
        self.location = adapter.location
        self.directory = None
        self.aliases = MappingProxyType({})
        self.pieces = dict(pieces)
        self.full = dict(full)
        stored = adapter.weights.specs
        specs = {n: s for n, s in base.specs.items() if n not in hidden}
        for name, source in full.items():
            specs[name] = TensorSpec(name, stored[source].shape, stored[source].dtype, stored[source].file)
        self.specs = MappingProxyType(specs)
        self._lock = threading.Lock()
        self._last: tuple[str, torch.dtype, LowRank] | None = None

    @property
    def config(self) -> Mapping[str, Any] | None:
        """None: the base's counts."""
        return None

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the adapter's weights."""
        return self.adapter.weights.identity()

    def touches(self, name: str) -> bool:
        """Whether the adapter changes the base's tensor `name`."""
        return name in self.pieces or name in self.full

    def nbytes_of(self, name: str) -> int:
        """Bytes that are read for it."""
        specs = self.adapter.weights.specs
        if name in self.full:
            return specs[self.full[name]].nbytes
        return sum(specs[n].nbytes for n in self._sources(name))

    def hash_of(self, name: str) -> str:
        """Hash over what the tensor's delta is made of; that of nothing for a tensor that is left alone."""
        hashes = self.adapter.hashes
        return hash_names((n, hashes[n]) for n in self._sources(name))

    def read(self, name: str) -> Tensor:
        """A tensor that was trained in full."""
        return self.adapter.weights.read(self.full[name])

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of a tensor that was trained in full."""
        self.adapter.weights.read_into(self.full[name], start, out)

    def delta(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Entries `start:stop` of the flattened delta of `name`; only the rows around them are formed."""
        piece = self.pieces.get(name)
        if piece is None:
            return torch.zeros(stop - start, dtype=dtype)
        if piece.bias:
            bias = self.adapter.bias_delta(piece.module, dtype)
            assert bias is not None
            return bias.flatten()[start:stop]
        factors = self.factors(name, dtype)
        rows, columns = factors.shape[-2:]
        out = torch.empty(stop - start, dtype=dtype)
        position = start
        while position < stop:
            expert, inside = divmod(position, rows * columns)
            first = inside // columns
            last = min(rows, first + max(1, (1 << 22) // columns), -(-(inside + stop - position) // columns))
            one = LowRank(factors.b_OR[expert], factors.a_RI[expert]) if factors.b_OR.ndim == 3 else factors
            slab = (one.b_OR[first:last] @ one.a_RI).flatten()
            take = slab[inside - first * columns :][: stop - position]
            out[position - start : position - start + take.numel()] = take
            position += take.numel()
        return out

    def factors(self, name: str, dtype: torch.dtype) -> LowRank:
        """The delta of the stored tensor, `*batch O I` with a convolution's kernel flattened into `I`."""
        with self._lock:
            if self._last is not None and self._last[:2] == (name, dtype):
                return self._last[2]
        piece = self.pieces[name]
        value = self.adapter.factors(piece.module, dtype)
        if piece.index is not None:
            value = LowRank(value.b_OR[piece.index], value.a_RI[piece.index])
        if piece.transposed:
            value = LowRank(value.a_RI.mT.contiguous(), value.b_OR.mT.contiguous())
        if piece.stop is not None:
            value = LowRank(value.b_OR[..., piece.start : piece.stop, :], value.a_RI)
        with self._lock:
            self._last = (name, dtype, value)
        return value

    def zero_factors(self, shape: tuple[int, ...], dtype: torch.dtype) -> LowRank:
        """The delta of a tensor of this stored shape that is left alone, as a product of zeros."""
        rows, columns = shape[0], math.prod(shape[1:])
        return LowRank(torch.zeros(rows, 1, dtype=dtype), torch.zeros(1, columns, dtype=dtype))

    def close(self) -> None:
        """Close the adapter's files."""
        self.adapter.weights.close()

    def _sources(self, name: str) -> tuple[str, ...]:
        if name in self.full:
            return (self.full[name],)
        piece = self.pieces.get(name)
        if piece is None:
            return ()
        if piece.bias:
            return (piece.module.bias,) if piece.module.bias is not None else ()
        return piece.module.a, piece.module.b


def is_formed(expert: Checkpoint, source: str) -> TypeGuard[AdapterExpert]:
    """Whether the expert's delta of this tensor is formed (a product of factors, or zeros), not read and subtracted."""
    return isinstance(expert, AdapterExpert) and source not in expert.full
