"""Files that change while ComfyUI runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[int, ...]


def stamp(file: Path) -> Stamp:
    """Size, times and number of a file, which tell two states of it apart; empty where there is no file."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


class Watched:
    """Counts how often a watched file was seen changed.

    ComfyUI asks a node for a fingerprint before its linked inputs are known, so a node that is given a stack cannot
    look at the files of the stack then. It watches the files that it has merged before, and answers with this number.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, Stamp] = {}
        self._number = 0

    def add(self, files: Iterable[Path]) -> None:
        """Watch these files from now on, those watched before as they were."""
        self._seen = {file: stamp(file) for file in files} | self._seen

    def number(self) -> int:
        """The number, one more if a file has changed since it was last asked for."""
        now = {file: stamp(file) for file in self._seen}
        self._number += now != self._seen
        self._seen = now
        return self._number
