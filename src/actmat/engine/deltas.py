"""The deltas of one part, as a rule takes them: one by one, all together, or place by place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from actmat.engine.reader import StreamedBase, TensorReader
from actmat.linalg.chunks import CHUNK_ENTRIES
from actmat.plan.parts import CHUNK, Part

__all__ = ["HeldDeltas", "LazyDeltas", "WalkedDeltas"]


class LazyDeltas(Sequence[Tensor]):
    """Deltas of one part; every item is read when it is asked for, and may be asked for once.

    A rule that takes them so looks at one at a time: each is laid over the one before it.
    """

    def __init__(self, reader: TensorReader, part: Part, base_raw: Tensor | StreamedBase) -> None:
        self._reader = reader
        self._part = part
        self._base_raw = base_raw
        self._n = reader.n_experts
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
        """See `linalg.chunks.Streamed`; the first walk hashes what it reads."""
        take, dtype = self._reader.scratch.take, self._reader.compute_dtype
        return self._places(lambda start, numel: [take(("delta", t), numel, dtype) for t in range(self._n)])

    def _places(self, room: Callable[[int, int], list[Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
        """Read all experts place by place into `room(start, numel)`; they share one conversion of the base."""
        for start in range(0, self._part.numel, CHUNK_ENTRIES):
            base_P = self._base_raw[start : start + CHUNK_ENTRIES]
            pieces_TP = room(start, base_P.numel())
            for t, piece_P in enumerate(pieces_TP):
                self.changed |= self._reader.read_place(t, self._part.start + start, base_P, piece_P)
            yield start, pieces_TP

    @property
    def shape(self) -> tuple[int, ...]:
        """See `linalg.chunks.Streamed`."""
        return self._part.shape

    @property
    def dtype(self) -> torch.dtype:
        """See `linalg.chunks.Streamed`."""
        return self._reader.compute_dtype

    def result(self) -> Tensor:
        """See `linalg.chunks.Streamed`."""
        return self._reader.result(self._part)

    def hold(self, *, walked: bool = False) -> Sequence[Tensor]:
        """All deltas, each in memory of its own until the next part is read.

        Args:
            walked: the rule does nothing but walk over them; its first walk then finds every place in the cache,
                because that is when it is read.
        """
        if not self._reader.can_walk or self._part.numel <= CHUNK:
            return HeldDeltas([self._read(t) for t in range(self._n)], self.result)
        buffers = [self._reader.buffer(self._part) for _ in range(self._n)]
        deltas = [buffer.view(self._part.shape) for buffer in buffers]
        places = self._places(lambda start, numel: [buffer[start : start + numel] for buffer in buffers])
        if walked:
            return WalkedDeltas(deltas, self.result, places)
        for _ in places:
            pass
        return HeldDeltas(deltas, self.result)


class HeldDeltas(list[Tensor]):
    """All deltas of one part; `result` gives room for what becomes of them (`linalg.chunks.AllocatesResult`)."""

    def __init__(self, deltas: Iterable[Tensor], result: Callable[[], Tensor]) -> None:
        super().__init__(deltas)
        self.result = result


class WalkedDeltas(Sequence[Tensor]):
    """Held deltas of which no place is read before a rule walks there (`linalg.chunks.Streamed`)."""

    def __init__(
        self,
        deltas: Sequence[Tensor],
        result: Callable[[], Tensor],
        unread: Iterator[tuple[int, list[Tensor]]],
    ) -> None:
        self._flats = [delta.view(-1) for delta in deltas]
        self._deltas = deltas
        self._unread = unread
        self._known = 0
        self.result = result
        self.shape = tuple(deltas[0].shape)
        self.dtype = deltas[0].dtype

    def __len__(self) -> int:
        return len(self._deltas)

    def __getitem__(self, t: int) -> Tensor:  # type: ignore[override]  # slices have no use here
        for start, pieces_TP in self._unread:
            self._known = start + pieces_TP[0].numel()
        return self._deltas[t]

    def walk(self) -> Iterator[tuple[int, list[Tensor]]]:
        """See `linalg.chunks.Streamed`; what an earlier walk has read is not read again."""
        for start in range(0, self._flats[0].numel(), CHUNK_ENTRIES):
            if start < self._known:
                yield start, [flat_N[start : start + CHUNK_ENTRIES] for flat_N in self._flats]
                continue
            _, pieces_TP = next(self._unread)
            self._known = start + pieces_TP[0].numel()
            yield start, pieces_TP
