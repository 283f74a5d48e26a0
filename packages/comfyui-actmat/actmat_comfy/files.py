"""Detect files that change while ComfyUI runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[int, ...]
MOST_WATCHED = 1000


def stamp(file: Path) -> Stamp:
    """Size, times and inode of a file, which identify its state; empty if it does not exist."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


class Watched:
    """Counts changes of watched files.

    ComfyUI requests a node's fingerprint before its linked inputs are known, so a node cannot check the files of its
    stack. Instead, it watches the files it merged before, and returns this number.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, Stamp] = {}
        self._number = 0

    def add(self, files: Iterable[Path]) -> None:
        """Watch these files, and the last ones before them; already watched files keep their recorded state."""
        seen = {file: self._seen.get(file) or stamp(file) for file in files} | self._seen
        self._seen = dict(itertools.islice(seen.items(), MOST_WATCHED))

    def number(self) -> int:
        """The number; increases by one if a file has changed since the last call."""
        now = {file: stamp(file) for file in self._seen}
        self._number += now != self._seen
        self._seen = now
        return self._number
