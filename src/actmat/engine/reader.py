"""Read one item from the base and all experts by regions, as deltas: hashed, checked and subtracted on the way.

Chunks are read into a warm buffer, hashed, converted to the compute dtype and reduced by the base while they are in
the cache, so that no second copy of a tensor ever exists in the storage dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from actmat.checkpoints.base import Tensors, torch_dtype
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.raw import WHOLE, raw_bytes
from actmat.engine.findings import Findings
from actmat.engine.inputs import Inputs
from actmat.engine.memory import Scratch
from actmat.engine.size import InputSample
from actmat.experts.deltas import Deltas, DeltaSource
from actmat.layout.types import Role, TensorLayout
from actmat.linalg.lowrank import LowRank
from actmat.planning.item import Item, Reading
from actmat.planning.regions import CHUNK, Region

PREFIX_BYTES = 256
"""Bytes that are compared first, before the rest."""


class ItemReader:
    """The bytes of one tensor in the base and in every expert, each read once, in order; or the factors of a module.

    Args:
        item: the tensor, or a module of adapters that are merged without a base.
        inputs: base and experts.
        compute_dtype: dtype of the deltas.
        scratch: buffers of this worker.
        findings: receives non-finite values.
        device: where methods compute; deltas are formed on the host, chunk by chunk, and sent. None: the host.

    Attributes:
        reading: of the deltas, for all outputs that share them; None if no delta is read.
        regions: in which the tensor is read.
        planned_bytes: memory on the host that is planned for all of it.
        inspect_only: nothing of this run will be kept; values are read to find all problems.
    """

    def __init__(
        self,
        item: Item,
        inputs: Inputs,
        compute_dtype: torch.dtype,
        scratch: Scratch,
        findings: Findings,
        device: torch.device | None = None,
    ) -> None:
        self.item = item
        self.inputs = inputs
        self.n_experts = len(inputs.experts)
        self.compute_dtype = compute_dtype
        self.on_host = device is None  # a simulated device computes on the CPU as well
        self.device = device or torch.device("cpu")
        self.scratch = scratch
        self.findings = findings
        self.reading: Reading | None = None
        self.regions: Sequence[Region] = ()
        self.planned_bytes = 0
        self.inspect_only = False
        self._sources = [s for s in item.sources if s is not None]  # none for a copy
        self._stored: list[tuple[Tensors | Deltas | None, str]] = []  # none without a base
        if item.has_base:
            names, base = (s.name for s in self._sources), inputs.base.tensors if inputs.base else None
            self._stored = [(base, item.name), *zip(inputs.experts, names, strict=False)]
        self._hashes = [ContentHash() for _ in self._stored]
        self.base_dtype = torch_dtype(item.target.spec.dtype)
        self._wide_key: tuple[int, int] | None = None
        self._base_chunk: tuple[int, int] | None = None
        self._checked = [0 for _ in inputs.experts]  # entries that were checked, from the first on; once is enough
        self._finite = [True for _ in inputs.experts]  # those that were
        self.sample: InputSample | None = None  # of a tensor that a method merges
        if item.call is not None and item.numel and item.has_base:
            self.sample = InputSample(item, self._sources, inputs.experts)

    @property
    def results_discarded(self) -> bool:
        """True if the results of this run are discarded."""
        return self.inspect_only or self.findings.fatal

    def base_of(self, region: Region) -> BaseEntries | None:
        """Entries of the base on a region as stored, held or streamed as the reading says; None without a base."""
        if not self.item.has_base:
            return None
        streamed = self.reading is not None and not self.reading.base_held
        return StreamedBase(self, region) if streamed else self.read_base(region)

    def read_base(self, region: Region) -> Tensor:
        """Entries of the region as stored, flat; reading the next region overwrites all that was read of this one."""
        if region.numel <= CHUNK:
            self._base_chunk = None
            raw = self.scratch.take("base", region.numel, self.base_dtype)
        else:
            self.scratch.room.restart()
            raw = self.scratch.room.take(region.numel, self.base_dtype)
        self.read_stored(0, region.start * raw.itemsize, raw_bytes(raw))
        return raw

    def base_chunk(self, start: int, numel: int) -> Tensor:
        """Entries of the base from `start` on as stored; the next chunk overwrites them. The first reading hashes."""
        raw = self.scratch.take("base", numel, self.base_dtype)
        if self._base_chunk != (start, numel):
            self.read_stored(0, start * raw.itemsize, raw_bytes(raw))
            self._base_chunk = start, numel
        return raw

    def read_stored(self, k: int, offset: int, out: memoryview) -> None:
        """Fill `out` with the base's bytes (`k = 0`) or those of expert `k - 1` from `offset` on; hash them once."""
        stored, name = self._stored[k]
        assert stored is not None, "an item that is read with its base has one"
        stored.read_into(name, offset, out)
        if offset == self._hashes[k].size:
            self._hashes[k].update(out)
            if self.sample is not None:
                self.sample.take(k, offset, out)

    def load(self, t: int, region: Region, base_raw: BaseEntries, into: Tensor | None = None) -> tuple[Tensor, bool]:
        """Delta of expert `t` on this region, shaped like it, and True if it has a nonzero entry.

        `into`: memory for it, if it is read; by default the worker's, where the next region overwrites it.
        """
        source = self._sources[t]
        if source.kind != "stored":
            formed = self.inputs.experts[t].dense(source.name, region.start, region.stop, self.compute_dtype)
            return formed.view(region.shape).to(self.device), source.kind == "formed"
        if into is not None:
            delta = into
        elif region.numel <= CHUNK and self.on_host:  # the buffer of this expert is overwritten by its next chunk
            delta = self.scratch.take(t, region.numel, self.compute_dtype)
        else:
            delta = self.buffer(region)
        changed = False
        for low in range(0, region.numel, CHUNK):
            target = delta[low : low + CHUNK]
            piece = target if self.on_host else self.scratch.take(t, target.numel(), self.compute_dtype)
            changed |= self.read_chunk(t, region.start + low, base_raw[low : low + CHUNK], piece)
            if not self.on_host:
                target.copy_(piece)
        return delta.view(region.shape), changed

    def buffer(self, region: Region) -> Tensor:
        """Memory for one delta of the region, flat, overwritten when the next region is read."""
        return self.scratch.room.take(region.numel, self.compute_dtype) if self.on_host else self.passing_buffer(region)

    def passing_buffer(self, region: Region) -> Tensor:
        """Memory for one delta of the region, flat, which is free when the last delta has been dropped."""
        return torch.empty(region.numel, dtype=self.compute_dtype, device=self.device)

    def converted_base(self, region: Region, base_raw: Tensor) -> Tensor:
        """The base on this region in the compute dtype, shaped like it, for a method that takes it."""
        if not self.on_host or base_raw.dtype == self.compute_dtype or region.numel <= CHUNK:
            return base_raw.to(self.device).to(self.compute_dtype).view(region.shape)
        return self.scratch.room.take(region.numel, self.compute_dtype).copy_(base_raw).view(region.shape)

    def result(self, region: Region) -> Tensor:
        """Memory for the merged delta of a region, shaped like it; contents arbitrary."""
        small = region.numel <= CHUNK
        return (self.passing_buffer(region) if small else self.buffer(region)).view(region.shape)

    def read_chunk(self, t: int, start: int, base_raw: Tensor, out: Tensor) -> bool:
        """Write the delta of expert `t` from entry `start` on; True if a first check finds a nonzero entry."""
        raw, data = self._read(t, start, out.numel())
        if same_bits(raw, data, base_raw):
            out.zero_()
            return self.check(t, start, out, raw, base_raw, same=True)
        torch.sub(out.copy_(raw), self.wide_base(start, base_raw), out=out)
        return self.check(t, start, out, raw, base_raw)

    def check(self, t: int, start: int, out: Tensor, raw: Tensor, base_raw: Tensor, *, same: bool = False) -> bool:
        """Clear the non-finite entries of the delta of expert `t`, from entry `start` on, in `out`.

        The entries of an expert are checked once, in order; after that only if some were not finite.

        Args:
            same: the expert has the bits of the base there.

        Returns:
            True if a first check finds a nonzero entry.
        """
        new = start == self._checked[t]
        if new:
            self._checked[t] += out.numel()
        if same or (not new and self._finite[t]):
            return False
        # A sum is finite only if every entry is (or it overflows, which the exact count then clears), and differs
        # from 0 only if an entry does: one cheap pass. Bits may differ where values do not: -0.0, another dtype.
        total = float(out.sum())
        if not math.isfinite(total):
            self._clear(out, raw, base_raw, t, note=new)
        return (math.isfinite(total) and total != 0) or bool(out.any())

    def _read(self, t: int, start: int, numel: int) -> tuple[Tensor, memoryview]:
        """Entries of expert `t` as stored and as bytes."""
        raw = self.scratch.take("expert", numel, torch_dtype(self._sources[t].dtype))
        data = raw_bytes(raw)
        self.read_stored(t + 1, start * raw.itemsize, data)
        return raw, data

    def wide_base(self, start: int, base_raw: Tensor) -> Tensor:
        """A chunk of the base (from entry `start` on) in the compute dtype; not to be written to.

        While a tensor is streamed, the experts of one chunk and the writing share one conversion.
        """
        if base_raw.dtype == self.compute_dtype:
            return base_raw
        key = (start, base_raw.numel())
        wide = self.scratch.take("wide_base", base_raw.numel(), self.compute_dtype)
        if self._wide_key != key:
            wide.copy_(base_raw)
            self._wide_key = key
        return wide

    def merged_chunks(self, region: Region, base_raw: BaseEntries, delta: Tensor, scale: float) -> Iterator[Tensor]:
        """`W_0 + scale * D*` on a region, flat, in consecutive chunks on the host; the next chunk overwrites the last.

        Sums land in a warm buffer: allocating for every chunk would cost as much as the arithmetic.
        """
        for low in range(0, base_raw.numel(), CHUNK):
            chunk = base_raw[low : low + CHUNK]
            merged = self.scratch.take("merged", chunk.numel(), self.compute_dtype)
            wide, change = self.wide_base(region.start + low, chunk), delta[low : low + CHUNK].to("cpu")
            yield torch.add(wide, change, alpha=scale, out=merged)

    def _clear(self, delta: Tensor, raw: Tensor, base_raw: Tensor, t: int, *, note: bool) -> None:
        """Note non-finite entries, once each, and count the expert as unchanged there.

        The merge fails in the end; going on with zeros finds all of them first.
        """
        self._finite[t] = False
        bad = ~torch.isfinite(raw)
        bad_base = ~torch.isfinite(base_raw)
        if raw.dtype == base_raw.dtype:  # the same non-finite bits in both are unchanged, not an error
            same = bad & (_bits(raw) == _bits(base_raw))
            delta.masked_fill_(same, 0.0)
            bad, bad_base = bad & ~same, bad_base & ~same
        if note and (n := int((bad & ~bad_base).sum())):
            self.findings.nonfinite[self.item.name, f"expert '{self.inputs.labels[t]}'"] += n
        if note and t == 0 and (n := int(bad_base.sum())):
            self.findings.nonfinite[self.item.name, "the base"] += n
        delta.masked_fill_(bad | bad_base, 0.0)

    def hashes(self) -> tuple[str, tuple[str, ...]]:
        """Content hashes of the base's tensor and of each expert's; all regions of the base must have been read.

        Entries that the method did not ask for are read now. Empty without a base.
        """
        if not self.item.has_base:
            return "", ()
        digests = []
        for t, source in enumerate(self._sources):
            if source.kind != "stored":
                digests.append(self.inputs.experts[t].content(source.name))
                continue
            width = torch_dtype(source.dtype).itemsize
            while (start := self._hashes[t + 1].size // width) < self.item.numel:
                self._read(t, start, min(CHUNK, self.item.numel - start))
            digests.append(self._hashes[t + 1].hexdigest())
        return self._hashes[0].hexdigest(), tuple(digests)

    def factors(self, region: Region) -> list[list[LowRank]]:
        """Per logical matrix of the region, every expert's delta in factored form, float64; none is stored whole."""
        split = [_logical(e, s, region) for e, s in zip(self.inputs.experts, self._sources, strict=True)]
        return [list(group) for group in zip(*split, strict=True)]

    def module_factors(self) -> list[LowRank]:
        """The experts' deltas of a module in float64; an expert without the module gives a zero of rank 1."""
        *batch, rows, columns = self.item.shape
        out = []
        for expert, source in zip(self.inputs.experts, self.item.sources, strict=True):
            if source is not None:
                product = expert.factors(source.name, self.item.shape, torch.float64)
                out.append(LowRank(product.a_RI.mT, product.b_OR.mT) if self.item.module.turned else product)
            else:
                b_OR = torch.zeros(*batch, rows, 1, dtype=torch.float64)
                out.append(LowRank(b_OR, torch.zeros(*batch, 1, columns, dtype=torch.float64)))
        return out

    def biases(self) -> list[Tensor | None]:
        """Addition of each expert to the bias of a module's layer, in float64; None without one."""
        pairs = zip(self.inputs.experts, self.item.sources, strict=True)
        return [None if s is None else e.bias(s.name, torch.float64) for e, s in pairs]


class StreamedBase:
    """The base on one region as stored, flat, cut like a tensor; every slice is read on request."""

    def __init__(self, reader: ItemReader, region: Region) -> None:
        self._reader = reader
        self._region = region

    def numel(self) -> int:
        """Number of entries."""
        return self._region.numel

    def __getitem__(self, where: slice) -> Tensor:
        start, stop, _ = where.indices(self._region.numel)
        return self._reader.base_chunk(self._region.start + start, stop - start)


BaseEntries = Tensor | StreamedBase
"""Entries of the base on a region as stored, flat, held or read chunk by chunk."""


def _logical(expert: Deltas, source: DeltaSource, region: Region) -> list[LowRank]:
    columns = math.prod(region.shape[1:])
    rows = region.numel // columns
    if source.kind == "formed":
        whole = expert.factors(source.name, region.shape, torch.float64)
        first, last = region.start // columns, region.stop // columns
        if whole.b_OR.ndim == 3:
            index, first = divmod(first, whole.b_OR.shape[-2])
            last = first + rows
            whole = LowRank(whole.b_OR[index], whole.a_RI[index])
        stored = LowRank(whole.b_OR[first:last], whole.a_RI)
    else:
        stored = expert.factors(source.name, (rows, columns), torch.float64)
    layout = region.layout
    if layout.role is Role.CONVOLUTION:
        return [stored]
    if layout.orientation == "IO":
        stored = LowRank(stored.a_RI.mT, stored.b_OR.mT)
    if not layout.blocks:
        return [stored]
    packed = TensorLayout(Role.FUSED_LINEAR, layout.reason, blocks=layout.blocks)
    return [LowRank(b_OR, stored.a_RI) for b_OR in packed.to_matrices(stored.b_OR)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(WHOLE[tensor.itemsize])


def same_bits(raw: Tensor, data: memoryview, base_raw: Tensor, base_data: memoryview | None = None) -> bool:
    """True if an expert is the base bit by bit, both also given as bytes; the first bytes rule out most others."""
    if raw.dtype != base_raw.dtype:
        return False
    base_data = raw_bytes(base_raw) if base_data is None else base_data
    if data[:PREFIX_BYTES] != base_data[:PREFIX_BYTES]:
        return False
    return torch.equal(_bits(raw), _bits(base_raw))
