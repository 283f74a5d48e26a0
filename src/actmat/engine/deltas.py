"""Read one tensor of all checkpoints, part by part, as deltas: hashed, checked and subtracted on the way.

Pieces of `CHUNK` entries are read into a warm buffer, hashed, converted to the compute dtype and reduced by the
base while they are in the cache, so that no second copy of a tensor ever exists in the storage dtype.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from actmat.checkpoints.adapter_expert import AdapterExpert, is_formed
from actmat.checkpoints.base import Checkpoint, torch_dtype
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.factored import part_factors
from actmat.engine.memory import Scratch
from actmat.linalg.lowrank import LowRank
from actmat.linalg.places import PLACE
from actmat.plan.adapter_experts import can_walk
from actmat.plan.model import TensorPlan
from actmat.plan.parts import CHUNK, Part

__all__ = ["Findings", "HeldDeltas", "LazyDeltas", "TensorReader"]


class Findings:
    """What is wrong with the values read so far: NaN and Inf, ties that do not hold. Thread-safe."""

    def __init__(self, *, tolerated: bool) -> None:
        self.tolerated = tolerated
        self._counts: dict[tuple[str, str], int] = {}
        self._broken_ties: list[str] = []
        self.foreign_statistics: list[str] = []
        self._mutex = threading.Lock()

    def add(self, tensor: str, expert: str, count: int) -> None:
        """Note `count` non-finite entries."""
        with self._mutex:
            self._counts[tensor, expert] = self._counts.get((tensor, expert), 0) + count

    def count(self, tensor: str) -> int:
        """Non-finite entries of one tensor, over all experts."""
        with self._mutex:
            return sum(n for (name, _), n in self._counts.items() if name == tensor)

    def add_broken_tie(self, problem: str) -> None:
        """Note two tensors that should be one and differ."""
        with self._mutex:
            self._broken_ties.append(problem)

    def add_foreign_statistics(self, problem: str) -> None:
        """Note a tensor that is not the one that its statistics were measured with."""
        with self._mutex:
            self.foreign_statistics.append(problem)

    @property
    def fatal(self) -> bool:
        """Whether the merge must be given up."""
        return bool(self.foreign_statistics) or bool(self._broken_ties) or (bool(self._counts) and not self.tolerated)

    def problems(self) -> list[str]:
        """One sentence per tensor and expert."""
        bad = {} if self.tolerated else self._counts
        return sorted(self._broken_ties) + [
            f"tensor '{name}' of {who} has {n} value{'s' if n > 1 else ''} that {'are' if n > 1 else 'is'} NaN or Inf"
            for (name, who), n in sorted(bad.items())
        ]


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
        experts: Sequence[Checkpoint],
        labels: Sequence[str],
        compute_dtype: torch.dtype,
        device: torch.device,
        scratch: Scratch,
        findings: Findings,
    ) -> None:
        self.item = item
        self.compute_dtype = compute_dtype
        self.device = device
        self._base = base
        self._experts = experts
        self._labels = labels
        self.scratch = scratch
        self._findings = findings
        self._base_hash = ContentHash()
        self._hashes = [ContentHash() for _ in experts]
        self._base_dtype = torch_dtype(item.base_dtype)
        self._wide_key: tuple[int, int] | None = None
        self._finite = [True for _ in experts]  # so far; what was read once and found so is not looked at again

    def read_base(self, part: Part) -> Tensor:
        """Entries of the part as stored, flat; reading the next part overwrites all that was read of this one."""
        if part.numel <= CHUNK:
            raw = self.scratch.take("base", part.numel, self._base_dtype)
        else:
            self.scratch.room.restart()
            raw = self.scratch.room.take(part.numel, self._base_dtype)
        data = raw_bytes(raw)
        self._base.read_into(self.item.name, part.start * raw.itemsize, data)
        self._base_hash.update(data)
        return raw

    def deltas(self, part: Part, base_raw: Tensor) -> LazyDeltas:
        """The deltas of a part, read when asked for, each once."""
        return LazyDeltas(self, part, base_raw, len(self._experts))

    def load(self, t: int, part: Part, base_raw: Tensor, into: Tensor | None = None) -> tuple[Tensor, bool]:
        """Delta of expert `t` on this part, shaped like it, and whether it is anything but zero.

        `into`: where to lay it, if it is read and larger than a piece; by default the worker's room, where the next
        part overwrites it.
        """
        expert, source = self._experts[t], self.item.sources[t]
        if is_formed(expert, source):
            formed = expert.delta(source, part.start, part.stop, self.compute_dtype)
            return formed.view(part.shape).to(self.device), expert.touches(source)
        if part.numel <= CHUNK:  # streamed: the buffer of this expert is overwritten by its next piece
            delta = self.scratch.take(("delta", t), part.numel, self.compute_dtype)
        else:
            delta = self.buffer(part) if into is None else into
        changed = False
        for low in range(0, part.numel, CHUNK):
            high = min(low + CHUNK, part.numel)
            changed |= self._piece(t, part.start + low, base_raw[low:high], delta[low:high])
        return delta.view(part.shape).to(self.device), changed

    def buffer(self, part: Part) -> Tensor:
        """Memory for one delta of the part, flat, overwritten by what is read of the next part."""
        return self.scratch.room.take(part.numel, self.compute_dtype)

    @property
    def can_walk(self) -> bool:
        """See `plan.adapter_experts.can_walk`."""
        return can_walk(self.device.type, self._experts, self.item.sources)

    def place(self, t: int, start: int, base_raw: Tensor) -> tuple[Tensor, bool]:
        """Delta of expert `t` from entry `start` on, as far as `base_raw` goes; the next overwrites it."""
        delta = self.scratch.take(("delta", t), base_raw.numel(), self.compute_dtype)
        return delta, self._piece(t, start, base_raw, delta)

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

    def _piece(self, t: int, start: int, base_raw: Tensor, out: Tensor) -> bool:
        """Write the delta to `out`; whether a first look at it finds anything but zeros."""
        dtype = torch_dtype(self.item.expert_dtypes[t])
        raw, new = self._read(t, start, out.numel())
        if dtype == base_raw.dtype and _same_bits(raw, base_raw):
            out.zero_()
            return False
        torch.sub(out.copy_(raw), self.wide_base(start, base_raw), out=out)
        if not new and self._finite[t]:
            return False
        self._check(out, raw, base_raw, t, note=new)
        return bool(out[:64].any()) or bool(out.any())  # bits may differ where values do not: -0.0, another dtype

    def _read(self, t: int, start: int, numel: int) -> tuple[Tensor, bool]:
        """Entries of expert `t` as stored, hashed when they are read for the first time, and whether they are."""
        raw = self.scratch.take("expert", numel, torch_dtype(self.item.expert_dtypes[t]))
        data = raw_bytes(raw)
        self._experts[t].read_into(self.item.sources[t], start * raw.itemsize, data)
        new = start * raw.itemsize == self._hashes[t].size
        if new:
            self._hashes[t].update(data)
        return raw, new

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

    def _check(self, delta: Tensor, raw: Tensor, base_raw: Tensor, t: int, *, note: bool) -> None:
        """Note non-finite entries, once each, and count the expert as unchanged there.

        Unless they are tolerated, the merge fails in the end; going on with zeros finds all of them first.

        A sum is finite only if every entry is (or it overflows, which the exact count then clears): one cheap pass.
        """
        if math.isfinite(delta.sum()):
            return
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
            while not is_formed(expert, source) and (start := self._hashes[t].size // width) < self.item.numel:
                self._read(t, start, min(CHUNK, self.item.numel - start))
        found = tuple(
            e.hash_of(s) if is_formed(e, s) else h.hexdigest()
            for e, s, h in zip(self._experts, self.item.sources, self._hashes, strict=False)
        )
        return self._base_hash.hexdigest(), found

    def factors(self, part: Part) -> list[list[LowRank]]:
        """Per logical matrix of the part, every expert's delta in factored form; all experts are adapters."""
        return part_factors([e for e in self._experts if isinstance(e, AdapterExpert)], self.item.sources, part)

    @property
    def n_experts(self) -> int:
        """Number of experts."""
        return len(self._experts)


class LazyDeltas(Sequence[Tensor]):
    """Deltas of one part; every item is read when it is asked for, and may be asked for once.

    A rule that takes them so looks at one at a time: each is laid over the one before it.
    """

    def __init__(self, reader: TensorReader, part: Part, base_raw: Tensor, n: int) -> None:
        self._reader = reader
        self._part = part
        self._base_raw = base_raw
        self._n = n
        self._seen: set[int] = set()
        self._buffer: Tensor | None = None
        self.changed = False

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, t: int) -> Tensor:  # type: ignore[override]  # slices have no use here
        if not 0 <= t < self._n:
            raise IndexError(t)
        if t in self._seen:
            raise RuntimeError("a rule declared one_pass asked for a delta twice; declare one_pass=False")
        self._seen.add(t)
        if self._buffer is None and self._part.numel > CHUNK:
            self._buffer = self._reader.buffer(self._part)
        return self._read(t, self._buffer)

    def _read(self, t: int, into: Tensor | None = None) -> Tensor:
        delta, changed = self._reader.load(t, self._part, self._base_raw, into)
        self.changed |= changed
        return delta

    def __iter__(self) -> Iterator[Tensor]:
        return (self[t] for t in range(self._n))

    def walk(self) -> Iterator[tuple[int, list[Tensor]]]:
        """See `linalg.places.Streamed`; the first walk hashes what it reads."""
        for start in range(0, self._base_raw.numel(), PLACE):
            base_P = self._base_raw[start : start + PLACE]
            found = [self._reader.place(t, self._part.start + start, base_P) for t in range(self._n)]
            self.changed |= any(changed for _, changed in found)
            yield start, [delta_P for delta_P, _ in found]

    @property
    def shape(self) -> tuple[int, ...]:
        """See `linalg.places.Streamed`."""
        return self._part.shape

    @property
    def dtype(self) -> torch.dtype:
        """See `linalg.places.Streamed`."""
        return self._reader.compute_dtype

    def result(self) -> Tensor:
        """See `linalg.places.Streamed`."""
        return self._reader.result(self._part)

    def hold(self) -> Sequence[Tensor]:
        """All deltas, read now; they are overwritten when the next part is read."""
        return HeldDeltas((self._read(t) for t in range(self._n)), self.result)


class HeldDeltas(list[Tensor]):
    """All deltas of one part; `result` gives room for what becomes of them (`linalg.places.HasRoom`)."""

    def __init__(self, deltas: Iterable[Tensor], result: Callable[[], Tensor]) -> None:
        super().__init__(deltas)
        self.result = result


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits; stops at the first difference."""
    return torch.equal(_bits(a), _bits(b))
