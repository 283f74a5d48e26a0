"""Write safetensors shards header first, tensors to their offsets, from several threads, hashed on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.writing.shards import INDEX_NAME, Placement, Shard, index_json
from actmat.checkpoints.writing.staging import disk_errors
from actmat.errors import OutputError

__all__ = ["ShardWriter", "TensorSink"]

_CHECK_BYTES = 1 << 22
_FLUSH_BYTES = 1 << 26


class TensorSink:
    """Where the bytes of one output tensor go, in row-major order; `aliases` get the same bytes.

    Use from one thread. `digest` is the content hash once all bytes are written.
    """

    def __init__(self, writer: ShardWriter, places: Sequence[Placement]) -> None:
        self._writer = writer
        self._places = places
        self._hash = ContentHash()

    def write(self, data: memoryview) -> None:
        """Append bytes to the tensor."""
        self._hash.update(data)
        for place in self._places:
            if self._hash.size > place.nbytes:
                raise ValueError(f"more bytes than the {place.nbytes} that the header promises")
            self._writer.pwrite(place.file, data, place.offset + self._hash.size - len(data))

    @property
    def digest(self) -> str:
        """Content hash of the whole tensor; all of its bytes must have been written."""
        if self._hash.size != self._places[0].nbytes:
            raise ValueError(f"{self._hash.size} bytes written, the header promises {self._places[0].nbytes}")
        return self._hash.hexdigest()


class ShardWriter:
    """The open shard files of one output directory.

    Args:
        directory: existing directory (the partial one).
        shards: from `plan_shards`; files that already have the right size and header are kept as they are.
        durable: flush to disk in the background while tensors arrive and wait for the disk in `finish`, so that
            a power failure after the final rename cannot leave holes in a model that looks finished.

    Raises:
        OutputError: no room, no permission.
    """

    def __init__(self, directory: Path, shards: Sequence[Shard], *, durable: bool = True) -> None:
        self.directory = directory
        self.shards = tuple(shards)
        self.durable = durable
        self._handles: dict[str, int] = {}
        self._unflushed = 0
        self._wake = threading.Event()
        self._closing = False
        self._flusher: threading.Thread | None = None
        self._flush_error: OSError | None = None
        self._places: Mapping[str, Placement] = {n: p for s in shards for n, p in s.placements.items()}
        try:
            for shard in shards:
                self._prepare(shard)
        except (OSError, OutputError):
            self.close()
            raise
        if durable:
            self._flusher = threading.Thread(target=self._flush_loop, name="actmat-flush", daemon=True)
            self._flusher.start()

    def _prepare(self, shard: Shard) -> None:
        with disk_errors(self.directory):
            handle = os.open(self.directory / shard.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._handles[shard.file] = handle
            if os.fstat(handle).st_size != shard.size or os.pread(handle, len(shard.header), 0) != shard.header:
                os.ftruncate(handle, 0)
                os.ftruncate(handle, shard.size)
                self.pwrite(shard.file, memoryview(shard.header), 0)

    def sink(self, name: str, aliases: Sequence[str] = ()) -> TensorSink:
        """Where to write tensor `name` (and its tied aliases)."""
        return TensorSink(self, [self._places[n] for n in (name, *aliases)])

    def holds(self, name: str, digest: str) -> bool:
        """Whether the bytes now on disk for `name` have this content hash (for resuming)."""
        place = self._places.get(name)
        if place is None:  # a damaged journal
            return False
        seen, buffer = ContentHash(), memoryview(bytearray(min(_CHECK_BYTES, max(place.nbytes, 1))))
        while seen.size < place.nbytes:
            piece = buffer[: min(len(buffer), place.nbytes - seen.size)]
            if os.preadv(self._handles[place.file], [piece], place.offset + seen.size) != len(piece):
                return False
            seen.update(piece)
        return seen.hexdigest() == digest

    def pwrite(self, file: str, data: memoryview, offset: int) -> None:
        """Write `data` at `offset` of `file`."""
        handle = self._handles[file]
        with disk_errors(self.directory):
            done = 0
            while done < len(data):
                done += os.pwrite(handle, data[done:], offset + done)
        self._unflushed += len(data)  # only paces the flusher: a lost update between threads does no harm
        if self._unflushed >= _FLUSH_BYTES:
            self._unflushed = 0
            self._wake.set()

    def finish(self, specs: Sequence[TensorSpec]) -> None:
        """Flush all shards to disk and write the index, last, when there are several shards."""
        self._stop_flusher()
        with disk_errors(self.directory):
            if self._flush_error is not None:
                raise self._flush_error
            if self.durable:
                for handle in self._handles.values():
                    os.fsync(handle)
            self.close()
            if len(self.shards) > 1:
                (self.directory / INDEX_NAME).write_text(index_json(self.shards, specs), encoding="utf-8")

    def close(self) -> None:
        """Close the files; may be called twice."""
        self._stop_flusher()
        while self._handles:
            os.close(self._handles.popitem()[1])

    def _flush_loop(self) -> None:
        """Push dirty pages to disk while tensors are computed, so that `finish` finds little left to do."""
        while True:
            self._wake.wait()
            if self._closing:
                return
            self._wake.clear()
            for handle in tuple(self._handles.values()):
                try:
                    os.fdatasync(handle)
                except OSError as error:
                    # the system tells a lost write once: the fsync in `finish` would not hear of it again
                    self._flush_error = error

    def _stop_flusher(self) -> None:
        if self._flusher is not None:
            self._closing = True
            self._wake.set()
            self._flusher.join()
            self._flusher = None
