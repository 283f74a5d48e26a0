"""Writer of a file whose tensors have no known sizes yet: each goes to a file of its own; all are joined at the end.

A run that stops keeps the tensors that it finished, also while they are joined. Their files are removed when the joined
one is on the disk; a step that fails after that makes them again.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from actmat.checkpoints.hashing import ContentHash, hash_file
from actmat.checkpoints.writing.shards import Shard
from actmat.checkpoints.writing.staging import disk_errors
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.system import replace_file, sync_file

SPOOL = ".spool"
"""Folder of the tensors' files, in that of the output."""

_CHUNK = 1 << 22


class SpoolSink:
    """Receives the bytes of one tensor and writes them to files, which appear when they are whole."""

    def __init__(self, paths: Sequence[Path], *, durable: bool) -> None:
        self._paths, self._durable = paths, durable
        with disk_errors(paths[0].parent):
            self._parts = [p.with_suffix(".part") for p in paths]
            self._files = [p.open("wb") for p in self._parts]
        self._hash = ContentHash()

    def write(self, data: memoryview) -> None:
        """Append bytes to the tensor."""
        self._hash.update(data)
        with disk_errors(self._paths[0].parent):
            for file in self._files:
                file.write(data)

    @property
    def digest(self) -> str:
        """Content hash of the complete tensor, whose files are then complete as well."""
        with disk_errors(self._paths[0].parent):
            while self._files:
                file, part, path = self._files.pop(), self._parts.pop(), self._paths[len(self._parts)]
                file.flush()
                if self._durable:
                    sync_file(file.fileno())
                file.close()
                replace_file(part, path)
        return self._hash.hexdigest()


class SpoolWriter:
    """The tensors of one output file, each in a file of its own.

    Args:
        directory: of the output; exists.
        file: name of the joined file, of an earlier attempt.
        durable: wait for the disk.
        attached: another process made the folder.
    """

    def __init__(self, directory: Path, file: str, *, durable: bool = True, attached: bool = False) -> None:
        self.directory, self.durable = directory, durable
        self._folder = directory / SPOOL
        if attached:
            return
        with disk_errors(directory):
            (directory / file).unlink(missing_ok=True)
            self._folder.mkdir(exist_ok=True)

    def sink(self, name: str, aliases: Sequence[str] = ()) -> SpoolSink:
        """Sink of tensor `name`; `aliases` get the same bytes."""
        return SpoolSink([self._path(n) for n in (name, *aliases)], durable=self.durable)

    def holds(self, name: str, digest: str) -> bool:
        """True if the bytes now on disk for `name` have this content hash (to resume a run)."""
        path = self._path(name)
        return path.is_file() and hash_file(path) == digest

    def join(self, shard: Shard) -> None:
        """Write the output's file, and remove those of its tensors.

        Raises:
            OutputError: writing failed.
        """
        writer = ShardWriter(self.directory, [shard], durable=self.durable)
        buffer = memoryview(bytearray(_CHUNK))
        try:
            for name in shard.extents:
                sink = writer.sink(name)
                with disk_errors(self.directory), self._path(name).open("rb") as file:
                    while count := file.readinto(buffer):
                        sink.write(buffer[:count])
            writer.sync()
        finally:
            writer.close()
        with disk_errors(self.directory):
            shutil.rmtree(self._folder)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _path(self, name: str) -> Path:
        seen = ContentHash()  # a tensor's name may hold characters that a file name may not
        seen.update(name.encode())
        return self._folder / seen.hexdigest()
