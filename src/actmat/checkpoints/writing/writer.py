"""Writer of safetensors shards: headers first, then tensors to their offsets from several threads, hashed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.writing.shards import Shard, index_files
from actmat.checkpoints.writing.staging import disk_errors
from actmat.errors import OutputError
from actmat.system import BINARY, DSYNC, NOFOLLOW, read_at, replace_file, sync_data, sync_file, write_at

_CHECK_BYTES = 1 << 22
_FLUSH_BYTES = 1 << 26
READ_FLAGS = os.O_RDONLY | NOFOLLOW | BINARY
SHARD_FLAGS = os.O_RDWR | os.O_CREAT | NOFOLLOW | BINARY
ATTACH_FLAGS = os.O_WRONLY | NOFOLLOW | BINARY
"""Shards that several machines write are opened for writing only: of a file that can be read too, a network file system
may read the page around a tensor's edge, and later write all of it back, with old bytes of the neighbor."""


class TensorSink:
    """Receives the bytes of one output tensor in row-major order, from one thread; tied tensors get the same bytes."""

    def __init__(self, writer: ShardWriter, specs: Sequence[TensorSpec]) -> None:
        self._writer = writer
        self._specs = specs
        self._hash = ContentHash()

    def write(self, data: memoryview) -> None:
        """Append bytes to the tensor."""
        self._hash.update(data)
        for spec in self._specs:
            if self._hash.size > spec.nbytes:
                raise ValueError(f"more bytes than the {spec.nbytes} that the header promises")
            self._writer.pwrite(spec.file, data, spec.offset + self._hash.size - len(data))

    @property
    def digest(self) -> str:
        """Content hash of the whole tensor; all of its bytes must have been written."""
        if self._hash.size != self._specs[0].nbytes:
            raise ValueError(f"{self._hash.size} bytes written, the header promises {self._specs[0].nbytes}")
        return self._hash.hexdigest()


class ShardWriter:
    """The open shard files of one output directory, which exists; files with the right size and header are kept.

    `durable` flushes to disk in the background while tensors are written and waits for the disk in `finish`, so that a
    power failure after the final rename cannot leave gaps in a model that looks finished.

    `attach` opens files that another process prepared: they are never made or cut, because several processes may write
    their own tensors to them. With `attach="synchronous"`, a write returns when the storage has the bytes.
    """

    def __init__(
        self,
        directory: Path,
        shards: Sequence[Shard],
        *,
        durable: bool = True,
        attach: Literal["", "cached", "synchronous"] = "",
    ) -> None:
        self.directory = directory
        self.shards = tuple(shards)
        self.durable = durable
        self._handles: dict[str, int] = {}
        self._unflushed = 0
        self._wake = threading.Event()
        self._closing = False
        self._flusher: threading.Thread | None = None
        self._flush_error: OSError | None = None
        self._specs = {name: spec for shard in shards for name, spec in shard.specs.items()}
        try:
            for shard in shards:
                if attach:
                    self._attach(shard, synchronous=attach == "synchronous")
                else:
                    self._prepare(shard)
        except (OSError, OutputError):
            self.close()
            raise
        if durable:
            self._flusher = threading.Thread(target=self._flush_loop, name="actmat-flush", daemon=True)
            self._flusher.start()

    def _prepare(self, shard: Shard) -> None:
        with disk_errors(self.directory):
            if "/" in shard.file:
                (self.directory / shard.file).parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.directory / shard.file, SHARD_FLAGS, 0o644)
            self._handles[shard.file] = handle
            if os.fstat(handle).st_size != shard.size or _start(handle, len(shard.header)) != shard.header:
                os.ftruncate(handle, 0)
                os.ftruncate(handle, shard.size)
                self.pwrite(shard.file, memoryview(shard.header), 0)

    def _attach(self, shard: Shard, *, synchronous: bool) -> None:
        """Open a file that another process made, for writing only; synchronous writes are never widened to a page.

        Raises:
            OutputError: its size or header changed: its content cannot be trusted, and others may be writing to it.
        """
        path = self.directory / shard.file
        with disk_errors(self.directory), _read_handle(path) as handle:
            size, header = os.fstat(handle).st_size, _start(handle, len(shard.header))
            _forget_pages(handle, 0, 0)
        if size != shard.size or header != shard.header:
            raise OutputError(
                f"{path} is damaged: expected {shard.size} bytes and the header of this merge, found {size} bytes"
                f"{'' if size != shard.size else ' and another header'}. Likely cause: another program changed the "
                f"file, or this is another folder of the same name. Fix: remove {self.directory} (rm -r), run "
                "again, and write to storage that all workers share."
            )
        with disk_errors(self.directory):
            self._handles[shard.file] = os.open(path, ATTACH_FLAGS | (DSYNC if synchronous else 0))

    def sink(self, name: str, aliases: Sequence[str] = ()) -> TensorSink:
        """Sink of tensor `name`, which also writes the tensors tied to it."""
        return TensorSink(self, [self._specs[n] for n in (name, *aliases)])

    def holds(self, name: str, digest: str) -> bool:
        """True if the bytes now on disk for `name` have this content hash (to resume a run)."""
        spec = self._specs.get(name)
        if spec is None:  # a damaged journal
            return False
        seen = ContentHash()
        with _read_handle(self.directory / spec.file) as handle:
            # from the disk, not from memory: after a failed flush, pages in memory no longer show what is missing
            _forget_pages(handle, spec.offset, spec.nbytes)
            for chunk in _stored_chunks(handle, spec):
                seen.update(chunk)
        return seen.hexdigest() == digest

    def pwrite(self, file: str, data: memoryview, offset: int) -> None:
        """Write `data` at `offset` of `file`."""
        handle = self._handles[file]
        with disk_errors(self.directory):
            done = 0
            while done < len(data):
                done += write_at(handle, data[done:], offset + done)
        self._unflushed += len(data)  # only paces the flusher: a lost update between threads does no harm
        if self._unflushed >= _FLUSH_BYTES:
            self._unflushed = 0
            self._wake.set()

    def sync(self) -> None:
        """Flush all shards to disk, if `durable`, and close them."""
        self._stop_flusher()
        with disk_errors(self.directory):
            if self._flush_error is not None:
                raise self._flush_error
            if self.durable:
                for handle in self._handles.values():
                    sync_file(handle)
            self.close()

    def finish(self, specs: Sequence[TensorSpec]) -> None:
        """Flush all shards to disk, then write the index of each checkpoint that has several."""
        self.sync()
        with disk_errors(self.directory):
            for name, text in index_files(self.shards, specs).items():
                (self.directory / name).write_text(text, encoding="utf-8", newline="\n")

    def keep_only(self, shard: Shard) -> None:
        """Leave tensors out of the only file, which is replaced when the one without them is on the disk.

        Args:
            shard: the file with the tensors that stay.

        Raises:
            OutputError: writing failed.
        """
        (written,) = self.shards
        if shard == written:
            return
        part = f"{shard.file}.part"
        specs = {name: replace(spec, file=part) for name, spec in shard.specs.items()}
        copy = ShardWriter(self.directory, [replace(shard, file=part, specs=specs)], durable=self.durable)
        with contextlib.closing(copy), disk_errors(self.directory):
            for name in shard.specs:
                sink = copy.sink(name)
                for chunk in _stored_chunks(self._handles[written.file], written.specs[name]):
                    sink.write(chunk)
            copy.sync()
            self.close()
            replace_file(self.directory / part, self.directory / written.file)
        self.shards = (shard,)

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
                    sync_data(handle)
                except OSError as error:
                    # the system reports a lost write only once: the fsync in `finish` would succeed
                    self._flush_error = error

    def _stop_flusher(self) -> None:
        if self._flusher is not None:
            self._closing = True
            self._wake.set()
            self._flusher.join()
            self._flusher = None


@contextlib.contextmanager
def _read_handle(path: Path) -> Iterator[int]:
    handle = os.open(path, READ_FLAGS)
    try:
        yield handle
    finally:
        os.close(handle)


def _stored_chunks(handle: int, spec: TensorSpec) -> Iterator[memoryview]:
    """The bytes of a tensor as they are stored, in order; fewer if the file ends before."""
    buffer, done = memoryview(bytearray(min(_CHECK_BYTES, spec.nbytes))), 0
    while count := read_at(handle, buffer[: spec.nbytes - done], spec.offset + done):
        yield buffer[:count]
        done += count


def _start(handle: int, length: int) -> bytes:
    """The first bytes of a file, fewer if it is shorter."""
    start = bytearray(length)
    return bytes(start[: read_at(handle, memoryview(start), 0)])


def _forget_pages(handle: int, offset: int, nbytes: int) -> None:
    """Drop clean pages of a range from memory; of the whole file from `offset` on where `nbytes` is 0."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)
