"""Positional reads of remote files from many threads: in blocks, fetched ahead, within bounded memory.

The bytes of a file are cut into blocks when its header is known: a large tensor into blocks of its own, consecutive
small tensors together. A block is one request, and belongs to no other; a merge that reads every tensor once fetches
every byte once. While one block of a tensor is read, the next is on its way. A block is dropped when all of it was
read; a thread that reads keeps at most `BLOCKS_PER_THREAD` per checkpoint.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter

from actmat.checkpoints.base import TensorSpec
from actmat.errors import CheckpointError

BLOCK_BYTES = 8 << 20
"""Bytes of one request: large enough that its latency is a small part, small enough to keep several."""

SMALL_BYTES = 1 << 20
"""Tensors up to this size share blocks with their neighbors."""

BLOCKS_PER_THREAD = 3
"""The block that is read, the next one, and the first of the next tensor."""

IN_FLIGHT = 8
"""Requests of one checkpoint at the same time."""

MOST_THREADS = 64

_start_of = attrgetter("start")


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """Bytes `start:stop` of a file; `goes_on`: the next block is of the same tensor."""

    start: int
    stop: int
    goes_on: bool = False


def plan_blocks(specs: Iterable[TensorSpec]) -> list[CachedBlock]:
    """Blocks that cover the tensors of one file, in order.

    >>> from actmat.checkpoints.base import TensorSpec
    >>> big = TensorSpec("w", (3 << 20,), "float32", "model.safetensors", offset=100)
    >>> bias = TensorSpec("b", (10,), "float32", "model.safetensors", offset=100 + (12 << 20))
    >>> [(b.stop - b.start, b.goes_on) for b in plan_blocks([big, bias])]
    [(8388608, True), (4194304, False), (40, False)]
    """
    blocks: list[CachedBlock] = []
    start = stop = 0  # of the small tensors since the last block
    for spec in sorted((s for s in specs if s.nbytes), key=lambda s: s.offset):
        end = spec.offset + spec.nbytes
        if spec.nbytes <= SMALL_BYTES and spec.offset == stop and end - start <= BLOCK_BYTES:
            stop = end
            continue
        if stop > start:
            blocks.append(CachedBlock(start, stop))
        if spec.nbytes <= SMALL_BYTES:
            start, stop = spec.offset, end
            continue
        edges = [*range(spec.offset, end, BLOCK_BYTES), end]
        blocks += [CachedBlock(a, b, b < end) for a, b in itertools.pairwise(edges)]
        start = stop = end
    if stop > start:
        blocks.append(CachedBlock(start, stop))
    return blocks


@dataclass(slots=True)
class _Held:
    """A requested block."""

    data: Future[bytes]
    unread: int


class RangeReader:
    """Files by label, read through `fetch(label, offset, length)`, which retries and raises `CheckpointError`."""

    def __init__(self, fetch: Callable[[str, int, int], bytes]) -> None:
        self._fetch = fetch
        self._files: dict[str, list[CachedBlock]] = {}
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, int], _Held] = OrderedDict()  # least recently used first
        self._threads: set[int] = set()
        self._pool: ThreadPoolExecutor | None = None
        self.closed = False

    def add(self, label: str, specs: Iterable[TensorSpec]) -> None:
        """Register a file; only the bytes of its tensors can be read."""
        self._files[label] = plan_blocks(specs)

    def read_into(self, label: str, offset: int, out: memoryview, *, tensor: str = "") -> None:
        """Fill `out` with bytes of tensors of the file from `offset` on. `tensor` is named in errors."""
        if self.closed:
            raise ValueError(f"{label}: read from a checkpoint that is closed")
        blocks, done = self._files[label], 0
        while done < len(out):
            position = offset + done
            number = bisect.bisect_right(blocks, position, key=_start_of) - 1
            block = blocks[number]
            held = self._ask(label, number)
            if block.goes_on:
                self._hint(label, number + 1)
            try:
                data = held.data.result()
            except CheckpointError as error:
                with self._lock:  # the next read sends a new request
                    self._held.pop((label, number), None)
                raise CheckpointError(f"tensor {tensor!r}: {error}" if tensor else str(error)) from error
            count = min(block.stop - position, len(out) - done)
            out[done : done + count] = memoryview(data)[position - block.start :][:count]
            done += count
            with self._lock:
                held.unread -= count
                if held.unread <= 0:
                    self._held.pop((label, number), None)

    def prefetch(self, label: str, offset: int) -> None:
        """Fetch the block at `offset` in the background, if there is memory for it. Never fails."""
        if not self.closed and (blocks := self._files.get(label)):
            self._hint(label, max(bisect.bisect_right(blocks, offset, key=_start_of) - 1, 0))

    def close(self) -> None:
        """Cancel requests without a waiting reader and drop all blocks. May be called twice."""
        with self._lock:
            self.closed = True
            self._held.clear()
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, label: str, number: int) -> _Held:
        """The block, requested if it is missing; the least recently used ones are dropped for it."""
        with self._lock:
            if len(self._threads) < MOST_THREADS:
                self._threads.add(threading.get_ident())
            held = self._held.get((label, number))
            if held is None:
                while len(self._held) > self._capacity - 1:
                    self._held.popitem(last=False)  # a thread may still wait for it, so it is not canceled
                held = self._start(label, number)
            self._held.move_to_end((label, number))
            return held

    def _hint(self, label: str, number: int) -> None:
        with self._lock:
            if not self.closed and (label, number) not in self._held and len(self._held) < self._capacity:
                self._start(label, number)

    @property
    def _capacity(self) -> int:
        return BLOCKS_PER_THREAD * max(1, len(self._threads))

    def _start(self, label: str, number: int) -> _Held:
        if self.closed:
            raise ValueError(f"{label}: read from a checkpoint that is closed")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(IN_FLIGHT, "actmat-fetch")
        block = self._files[label][number]
        held = _Held(self._pool.submit(self._fetch, label, block.start, block.stop - block.start),
                     block.stop - block.start)  # fmt: skip
        self._held[label, number] = held
        return held
