"""Journal: one JSON object per line and finished item; entries stay on the disk, their positions in memory.

A line is written with one call and is complete if it ends in a newline. Reading goes through the file once; an entry is
read again from its position on request, so that a journal of 100,000 items takes a few bytes of memory for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from actmat.bounds import open_regular, parse_object
from actmat.errors import OutputError
from actmat.system import BINARY, NOFOLLOW, read_at

MAX_LINE_BYTES = 1 << 26
"""Longest line; one with the measures of a matrix takes some kilobytes."""

LENGTH_BITS = 27
"""Bits of a position that hold the line's length; the others hold its offset."""


class Journal(Mapping[str, dict[str, Any]]):
    """Entries of a journal by their `name`; of two with the same name, the later one. Appending is thread-safe.

    Args:
        path: the file; `start` or `resume` opens it for appending.

    Attributes:
        head: the first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        self._places: dict[str, int] = {}
        self._good = 0
        self._file: IO[bytes] | None = None
        self._mutex = threading.Lock()

    def start(self, head: Mapping[str, Any]) -> None:
        """Create the file, with its first line.

        Raises:
            OSError: it cannot be written; FileExistsError, it exists.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | BINARY | NOFOLLOW
        self._file = os.fdopen(os.open(self.path, flags, 0o644), "rb+", 0)  # a buffer would fail again when closed
        self.head = dict(head)
        self._good += self._write(head)

    @classmethod
    def read(cls, path: Path) -> Journal:
        """The entries before the first damaged line, of a journal that another process may be appending to.

        Raises:
            OutputError: it cannot be read, or is not a regular file.
        """
        journal = cls(path)
        with open_regular(path, error=OutputError) as file:
            journal._scan(file)
        return journal

    def resume(self) -> None:
        """Open for appending, after the damaged end is cut off."""
        self._file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_APPEND | BINARY | NOFOLLOW), "rb+", 0)
        if os.fstat(self._file.fileno()).st_size > self._good:  # cut, not written again: the disk may be full
            os.ftruncate(self._file.fileno(), self._good)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one entry.

        Raises:
            OSError: writing failed.
        """
        with self._mutex:
            length = self._write(entry)
            self._places[entry["name"]] = self._good << LENGTH_BITS | length
            self._good += length

    def catch_up(self) -> None:
        """Add lines of the file that a signal kept `append` from noting."""
        aside = contextlib.suppress(OutputError)  # it was put aside, or the disk failed: what is known stays
        with self._mutex, aside, open_regular(self.path, error=OutputError) as file:
            file.seek(self._good)
            self._scan(file)

    def drop(self, name: str) -> None:
        """Drop an entry from memory; its line stays in the file."""
        del self._places[name]

    def close(self) -> None:
        """Close the file; entries can still be read. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __getitem__(self, name: str) -> dict[str, Any]:
        place = self._places[name]
        offset, length = place >> LENGTH_BITS, place & (1 << LENGTH_BITS) - 1
        line = memoryview(bytearray(length))
        if self._file is not None:
            read_at(self._file.fileno(), line, offset)
        else:
            with open_regular(self.path, error=OutputError) as file:
                read_at(file.fileno(), line, offset)
        return parse_object(bytes(line), self.path.name, error=OutputError)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def _write(self, entry: Mapping[str, Any]) -> int:
        """Append a line and return its length."""
        assert self._file is not None
        text = (json.dumps(entry) + "\n").encode()
        line = memoryview(text)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._good)  # half a line would hide those after it
            raise
        return len(text)

    def _scan(self, file: IO[bytes]) -> None:
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n"):  # it was being written when the process died
                return
            try:
                entry = parse_object(line, self.path.name, error=OutputError)
            except OutputError:
                return
            if not self._good:
                self.head = entry
            elif isinstance(name := entry.get("name"), str):
                self._places[name] = self._good << LENGTH_BITS | len(line)
            else:
                return
            self._good += len(line)
