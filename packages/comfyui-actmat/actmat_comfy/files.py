"""Contents of files that change while ComfyUI runs: hashes, and a number that tells that one has changed."""

from __future__ import annotations

import hashlib
from pathlib import Path

Stamp = tuple[int, int] | None


def stamp(file: Path) -> Stamp:
    """Size and time of the last change; None where there is no file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


class Hashes:
    """SHA-256 of files, computed again only when size or time have changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Stamp, str]] = {}

    def of(self, file: Path) -> str:
        """Hash of the contents."""
        now = stamp(file)
        known = self._known.get(file)
        if known is None or known[0] != now:
            with file.open("rb") as stream:
                known = (now, hashlib.file_digest(stream, "sha256").hexdigest())
            self._known[file] = known
        return known[1]


class Generation:
    """Counts how often a watched file was seen changed.

    ComfyUI asks a node for a fingerprint before its linked inputs are known, so a node that is given a stack cannot
    hash the files of the stack then. It watches the files that it has merged before, and answers with this number.
    """

    def __init__(self) -> None:
        self._stamps: dict[Path, Stamp] = {}
        self._number = 0

    def watch(self, files: list[Path]) -> None:
        """Watch these files from now on, those watched before as they were."""
        for file in files:
            self._stamps.setdefault(file, stamp(file))

    def number(self) -> int:
        """The number, one more if a file has changed since it was last asked for."""
        changed = {file: now for file, before in self._stamps.items() if (now := stamp(file)) != before}
        self._stamps |= changed
        self._number += bool(changed)
        return self._number
