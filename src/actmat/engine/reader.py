"""Read one tensor of all checkpoints, part by part, as deltas: hashed, checked and subtracted on the way.

Pieces of `CHUNK` entries are read into a warm buffer, hashed, converted to the compute dtype and reduced by the
base while they are in the cache, so that no second copy of a tensor ever exists in the storage dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint, torch_dtype
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.factored import part_factors
from actmat.engine.findings import Findings
from actmat.engine.memory import Scratch
from actmat.experts.base import Expert
from actmat.experts.lora.expert import is_formed
from actmat.linalg.lowrank import LowRank
from actmat.plan.adapter_experts import can_walk
from actmat.plan.model import TensorPlan
from actmat.plan.parts import CHUNK, Part

__all__ = ["StreamedBase", "TensorReader", "same_bits"]

GLANCE = 256
"""Bytes that are compared before all are."""


class TensorReader:
    """The bytes of one tensor in the base and in every expert; each byte is read once, in order.

    Args:
        item: the tensor.
        base, experts: where it is stored.
        labels: names of the experts, for findings.
        compute_dtype: dtype of the deltas.
        device: where deltas are wanted.
        scratch: buffers of this worker.
        findings: where non-finite values are noted.
    """

    def __init__(
        self,
        item: TensorPlan,
        base: Checkpoint,
        experts: Sequence[Expert],
        labels: Sequence[str],
        compute_dtype: torch.dtype,
        device: torch.device,
        scratch: Scratch,
        findings: Findings,
    ) -> None:
        self.item = item
        self.compute_dtype = compute_dtype
        self.device = device
        self._experts = experts
        self._labels = labels
        self.scratch = scratch
        self._findings = findings
        self._stored: list[tuple[Checkpoint | Expert, str]] = [(base, item.name)]
        self._stored += zip(experts, item.sources, strict=False)  # a copy names no sources
        self._hashes = [ContentHash() for _ in self._stored]
        self._base_dtype = torch_dtype(item.base_dtype)
        self._wide_key: tuple[int, int] | None = None
        self._base_place: tuple[int, int] | None = None
        self._looked = [0 for _ in experts]  # entries that were looked at, from the first on; once is enough
        self._finite = [True for _ in experts]  # those that were

    def read_base(self, part: Part) -> Tensor:
        """Entries of the part as stored, flat; reading the next part overwrites all that was read of this one."""
        if part.numel <= CHUNK:
            self._base_place = None
            raw = self.scratch.take("base", part.numel, self._base_dtype)
        else:
            self.scratch.room.restart()
            raw = self.scratch.room.take(part.numel, self._base_dtype)
        self.read_stored(0, part.start * raw.itemsize, raw_bytes(raw))
        return raw

    def base_place(self, start: int, numel: int) -> Tensor:
        """Entries of the base from `start` on as stored; the next place overwrites them. The first reading hashes."""
        raw = self.scratch.take("base", numel, self._base_dtype)
        if self._base_place != (start, numel):
            self.read_stored(0, start * raw.itemsize, raw_bytes(raw))
            self._base_place = start, numel
        return raw

    def read_stored(self, k: int, offset: int, out: memoryview) -> None:
        """Fill `out` with the base's bytes (`k = 0`) or those of expert `k - 1` from `offset` on; hash them once."""
        checkpoint, name = self._stored[k]
        checkpoint.read_into(name, offset, out)
        if offset == self._hashes[k].size:
            self._hashes[k].update(out)

    def load(
        self, t: int, part: Part, base_raw: Tensor | StreamedBase, into: Tensor | None = None
    ) -> tuple[Tensor, bool]:
        """Delta of expert `t` on this part, shaped like it, and whether it is anything but zero.

        `into`: where to lay it, if it is read and larger than a piece; by default the worker's room, where the next
        part overwrites it.
        """
        expert, source = self._experts[t], self.item.sources[t]
        if is_formed(expert, source):
            formed = expert.delta(source, part.start, part.stop, self.compute_dtype)
            return formed.view(part.shape).to(self.device), expert.source(source).kind != "zero"
        if part.numel <= CHUNK:  # streamed: the buffer of this expert is overwritten by its next piece
            delta = self.scratch.take(("delta", t), part.numel, self.compute_dtype)
        else:
            delta = self.buffer(part) if into is None else into
        changed = False
        for low in range(0, part.numel, CHUNK):
            high = min(low + CHUNK, part.numel)
            changed |= self.read_place(t, part.start + low, base_raw[low:high], delta[low:high])
        return delta.view(part.shape).to(self.device), changed

    def buffer(self, part: Part) -> Tensor:
        """Memory for one delta of the part, flat, overwritten by what is read of the next part."""
        return self.scratch.room.take(part.numel, self.compute_dtype)

    @property
    def can_walk(self) -> bool:
        """See `plan.adapter_experts.can_walk`."""
        return can_walk(self.device.type, self._experts, self.item.sources)

    def converted_base(self, part: Part, base_raw: Tensor) -> Tensor:
        """The base on this part in the compute dtype, shaped like it, for a rule that looks at it."""
        if base_raw.dtype == self.compute_dtype or part.numel <= CHUNK:
            return base_raw.to(self.compute_dtype).view(part.shape).to(self.device)
        return self.scratch.room.take(part.numel, self.compute_dtype).copy_(base_raw).view(part.shape).to(self.device)

    def result(self, part: Part) -> Tensor:
        """Where a rule may build the merged delta of a part, shaped like it; contents arbitrary."""
        if self.device.type != "cpu" or part.numel <= CHUNK:
            return torch.empty(part.shape, dtype=self.compute_dtype, device=self.device)
        return self.scratch.room.take(part.numel, self.compute_dtype).view(part.shape)

    def read_place(self, t: int, start: int, base_raw: Tensor, out: Tensor) -> bool:
        """Write the delta of expert `t` from entry `start` on; whether a first look finds anything but zeros."""
        raw, data = self._read(t, start, out.numel())
        if same_bits(raw, data, base_raw):
            out.zero_()
            return self.look(t, start, out, raw, base_raw, same=True)
        torch.sub(out.copy_(raw), self.wide_base(start, base_raw), out=out)
        return self.look(t, start, out, raw, base_raw)

    def look(
        self, t: int, start: int, out: Tensor, raw: Tensor, base_raw: Tensor, *, same: bool = False, new: bool = True
    ) -> bool:
        """Clear what is not finite of the delta of expert `t` from entry `start` on, in `out`.

        The entries of an expert are looked at once, in order; after that only if some were not finite.

        Args:
            same: the expert has the bits of the base there.
            new: whether this may be the first look.

        Returns:
            Whether a first look finds anything but zeros.
        """
        new = new and start == self._looked[t]
        if new:
            self._looked[t] += out.numel()
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
        raw = self.scratch.take("expert", numel, torch_dtype(self.item.expert_dtypes[t]))
        data = raw_bytes(raw)
        self.read_stored(t + 1, start * raw.itemsize, data)
        return raw, data

    def wide_base(self, start: int, base_raw: Tensor) -> Tensor:
        """A piece of the base (from entry `start` on) in the compute dtype; not to be written to.

        While a tensor is streamed, the experts of one piece and the writing share one conversion.
        """
        if base_raw.dtype == self.compute_dtype:
            return base_raw
        key = (start, base_raw.numel())
        wide = self.scratch.take("wide", base_raw.numel(), self.compute_dtype)
        if self._wide_key != key:
            wide.copy_(base_raw)
            self._wide_key = key
        return wide

    def _clear(self, delta: Tensor, raw: Tensor, base_raw: Tensor, t: int, *, note: bool) -> None:
        """Note non-finite entries, once each, and count the expert as unchanged there.

        Unless they are tolerated, the merge fails in the end; going on with zeros finds all of them first.
        """
        self._finite[t] = False
        bad = ~torch.isfinite(raw)
        bad_base = ~torch.isfinite(base_raw)
        if raw.dtype == base_raw.dtype:  # the same non-finite bits in both are unchanged, no one's mistake
            kept = bad & (_bits(raw) == _bits(base_raw))
            delta.masked_fill_(kept, 0.0)
            bad, bad_base = bad & ~kept, bad_base & ~kept
        if note and (n := int((bad & ~bad_base).sum())):
            self._findings.add(self.item.name, f"expert '{self._labels[t]}'", n)
        if note and t == 0 and (n := int(bad_base.sum())):
            self._findings.add(self.item.name, "the base", n)
        delta.masked_fill_(bad | bad_base, 0.0)

    def hashes(self) -> tuple[str, tuple[str, ...]]:
        """Content hashes of the base's tensor and of each expert's; all parts of the base must have been read.

        What a rule did not look at is read now.
        """
        for t, (expert, source) in enumerate(zip(self._experts, self.item.sources, strict=False)):
            width = torch_dtype(self.item.expert_dtypes[t]).itemsize
            while not is_formed(expert, source) and (start := self._hashes[t + 1].size // width) < self.item.numel:
                self._read(t, start, min(CHUNK, self.item.numel - start))
        found = tuple(
            e.content(s) if is_formed(e, s) else h.hexdigest()
            for e, s, h in zip(self._experts, self.item.sources, self._hashes[1:], strict=False)
        )
        return self._hashes[0].hexdigest(), found

    def factors(self, part: Part) -> list[list[LowRank]]:
        """Per logical matrix of the part, every expert's delta in factored form; all experts are adapters."""
        return part_factors(self._experts, self.item.sources, part)

    @property
    def n_experts(self) -> int:
        """Number of experts."""
        return len(self._experts)


class StreamedBase:
    """The base on one part as stored, flat, cut like a tensor; every slice is read when it is asked for."""

    def __init__(self, reader: TensorReader, part: Part) -> None:
        self._reader = reader
        self._part = part

    def numel(self) -> int:
        """Number of entries."""
        return self._part.numel

    def __getitem__(self, place: slice) -> Tensor:
        start, stop, _ = place.indices(self._part.numel)
        return self._reader.base_place(self._part.start + start, stop - start)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def same_bits(raw: Tensor, data: memoryview, base_raw: Tensor, base_data: memoryview | None = None) -> bool:
    """Whether an expert is the base bit by bit, both also given as bytes; the first few tell most that are not."""
    if raw.dtype != base_raw.dtype:
        return False
    base_data = raw_bytes(base_raw) if base_data is None else base_data
    if data[:GLANCE] != base_data[:GLANCE]:
        return False
    return torch.equal(_bits(raw), _bits(base_raw))
