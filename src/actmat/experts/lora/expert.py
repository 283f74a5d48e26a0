"""An adapter as an expert: the tensors of its base, with deltas where the adapter has them.

Shapes: `O` rows and `I` columns of a tensor as it is stored, `R` rank, `E` stacked experts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint, FileIdentity, TensorSpec, versions_of_files
from actmat.checkpoints.hashing import hash_names
from actmat.errors import CheckpointError
from actmat.experts.base import AdapterHandle, Expert, Family, Source
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.apart import packed_product, put_rows
from actmat.experts.lora.fitting import Fit, fit_adapter
from actmat.experts.untied import keeps_ties, tied_parts
from actmat.layout.types import Block
from actmat.linalg.lowrank import LowRank

_SLAB = 1 << 22
"""Entries of a product that are formed at a time."""


class AdapterExpert(Expert):
    """`W_0 + scaling * B A` without the sum: `delta` gives the deltas, only tensors trained in full are stored.

    Args:
        adapter: what is added; closed with the expert.
        base: what it is added to; may be closed afterwards. None: the expert gives the stored tensors, by their names.
        fit: where each delta lies on the base.
        family: opens it again.
    """

    kind = "adapter"
    adapter: Adapter

    def __init__(self, adapter: Adapter, base: Checkpoint | None, fit: Fit, family: Family) -> None:
        stored = adapter.weights.specs
        self.adapter = adapter
        self.location = adapter.location
        self.n_tensors = len(stored)
        self.nbytes = sum(spec.nbytes for spec in stored.values())
        self._base, self._family = base, family
        self._pieces = fit.pieces
        self._full = fit.full
        self.notes = _notes(adapter, fit)
        self.specs = stored
        if base is not None:
            specs = {name: spec for name, spec in base.specs.items() if name not in fit.hidden}
            for name, source in fit.full.items():
                specs[name] = TensorSpec(name, stored[source].shape, stored[source].dtype, stored[source].file)
            self.specs = MappingProxyType(specs)
        self._lock = threading.Lock()
        self._last: tuple[str, torch.dtype, LowRank] | None = None

    def hashes(self) -> Mapping[str, str]:
        """Content hash of every tensor of the adapter."""
        return self.adapter.hashes

    def check_values(self, label: str) -> list[str]:
        """One sentence for each tensor of the adapter with NaN or Inf."""
        return self.adapter.check_values(label)

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the adapter's weights."""
        return self.adapter.weights.identity()

    def close(self) -> None:
        """Close the adapter's files."""
        self.adapter.weights.close()

    def source(self, name: str) -> Source:
        """Stored if it was trained in full, formed if a module changes it, else zero."""
        dtype, stored = self._spec(name).dtype, self.adapter.weights.specs
        nbytes = sum(stored[n].nbytes for n in self._tensors_of(name))
        if name in self._full:
            return Source(name, "stored", dtype, nbytes)
        pieces = self._pieces.get(name)
        if pieces is None:
            return Source(name, "zero", dtype, nbytes)
        return Source(name, "formed", dtype, nbytes, sum(0 if p.bias else p.module.rank for p in pieces))

    def read(self, name: str) -> Tensor:
        """A tensor that was trained in full."""
        if name not in self._full:
            self._refuse(name, "read")
        return self.adapter.weights.read(self._full[name])

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of a tensor that was trained in full."""
        if name not in self._full:
            self._refuse(name, "read")
        self.adapter.weights.read_into(self._full[name], start, out)

    def delta(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Entries `start:stop` of the flattened delta of `name`; only the rows around them are formed."""
        if self.source(name).kind != "formed":
            return super().delta(name, start, stop, dtype)
        if self._pieces[name][0].bias:
            return self._bias(name, dtype)[start:stop]
        return entries_of(self._product(name, dtype), start, stop)

    def factors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> LowRank:
        """The delta as a product, with a convolution's kernel flattened into `I`."""
        return self._product(name, dtype) if self.source(name).rank else super().factors(name, shape, dtype)

    def content(self, name: str) -> str:
        """Hash over the factors of the tensor's delta; that of nothing for a zero delta."""
        if self.source(name).kind == "stored":
            self._refuse(name, "formed")
        hashes = self.adapter.hashes
        return hash_names((n, hashes[n]) for n in self._tensors_of(name))

    def handle(self) -> AdapterHandle:
        """The adapter's location, the address of its base, and the versions of remote files."""
        base = None if self._base is None else self._base.handle()
        return AdapterHandle(self.location, self._family, base, versions_of_files(self.identity()))

    def _product(self, name: str, dtype: torch.dtype) -> LowRank:
        """The factors on the stored tensor, `*batch O I`; the last ones are kept, as they are asked for in parts."""
        with self._lock:
            if self._last is not None and self._last[:2] == (name, dtype):
                return self._last[2]
        pieces = self._pieces[name]
        if pieces[0].rows:
            assert self._base is not None, "pieces are rows of a base's tensor"
            shape = self._base.specs[name].shape
            parts = [(self.adapter.factors(p.module, dtype), p.rows) for p in pieces]
            value = packed_product(parts, shape[1] if pieces[0].transposed else shape[0])
        else:
            value = self.adapter.factors(pieces[0].module, dtype)
        piece = pieces[0]
        if piece.index is not None:
            value = LowRank(value.b_OR[piece.index], value.a_RI[piece.index])
        if piece.transposed:
            value = LowRank(value.a_RI.mT.contiguous(), value.b_OR.mT.contiguous())
        if piece.stop is not None:
            value = LowRank(value.b_OR[..., piece.start : piece.stop, :], value.a_RI)
        with self._lock:
            self._last = (name, dtype, value)
        return value

    def _bias(self, name: str, dtype: torch.dtype) -> Tensor:
        """The delta of a bias, from all its pieces."""
        out = torch.zeros(self.specs[name].numel, 1, dtype=dtype)
        for piece in self._pieces[name]:
            found = self.adapter.bias_delta(piece.module, dtype)
            assert found is not None, "only modules with a bias have such a piece"
            rows = piece.rows or (Block("all", 0, len(out)),)
            put_rows(out, found.flatten()[piece.start : piece.stop, None], rows)
        return out.flatten()

    def _tensors_of(self, name: str) -> tuple[str, ...]:
        """Names in the adapter of the tensors that its delta is made of."""
        if name in self._full:
            return (self._full[name],)
        names: list[str | None] = []
        for piece in self._pieces.get(name, ()):
            module = piece.module
            names += [module.bias] if piece.bias else [module.a, module.b, module.alpha]
        return tuple(n for n in names if n is not None)


def entries_of(product: LowRank, start: int, stop: int) -> Tensor:
    """Entries `start:stop` of the flattened product; only the rows around them are formed, a slab at a time."""
    rows, columns = product.shape[-2:]
    out = torch.empty(stop - start, dtype=product.b_OR.dtype)
    position = start
    while position < stop:
        expert, inside = divmod(position, rows * columns)
        first = inside // columns
        last = min(rows, first + max(1, _SLAB // columns), -(-(inside + stop - position) // columns))
        one = LowRank(product.b_OR[expert], product.a_RI[expert]) if product.b_OR.ndim == 3 else product
        slab = (one.b_OR[first:last] @ one.a_RI).flatten()
        found = slab[inside - first * columns :][: stop - position]
        out[position - start : position - start + found.numel()] = found
        position += found.numel()
    return out


def _notes(adapter: Adapter, fit: Fit) -> tuple[str, ...]:
    """Remarks for the plan."""
    notes = [
        f"the base is no {part}: {count} modules of the adapter, those of the {part}, are left out"
        for part, count in fit.left_out.items()
    ]
    return (
        *adapter.notes,
        *notes,
        *fit.notes,
        *(["it holds copies of base weights; the base's own are used"] if adapter.copies else []),
    )


def fitted_expert(adapter: Adapter, location: str | Path, base: Checkpoint, family: Family) -> AdapterExpert:
    """An adapter on its base.

    Raises:
        CheckpointError: it does not fit; carries all problems.
    """
    parts = tied_parts(
        base,
        {name: adapter.weights.specs[stored] for name, stored in adapter.extras.items()},
        {f"{module.inside}.weight": module.shape for module in adapter.modules.values()},
        keeps_ties=keeps_ties(adapter.config.fields),
        equal=lambda a, b: adapter.hashes[adapter.extras[a]] == adapter.hashes[adapter.extras[b]],
    )
    fit = fit_adapter(adapter, parts.base)
    if problems := parts.problems_with(fit.problems):
        raise CheckpointError(
            f"{location}: the adapter cannot be merged into {base.location}.",
            [f"{location}: {problem}" for problem in problems],
        )
    fit = replace(fit, full={n: stored for n, stored in fit.full.items() if n not in parts.copies})
    expert = AdapterExpert(adapter, parts.base, fit, family)
    expert.heads, expert.notes = parts.heads, (*expert.notes, *parts.notes)
    return expert


def unfitted_expert(adapter: Adapter, family: Family) -> AdapterExpert:
    """An adapter without a base, for outputs that are adapters."""
    return AdapterExpert(adapter, None, Fit({}, {n: n for n in adapter.weights.specs}, frozenset(), ()), family)
