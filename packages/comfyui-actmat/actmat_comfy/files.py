"""Contents of files that change while ComfyUI runs: hashes, and a number that tells that one has changed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

Stamp = tuple[int, int] | None

CLOCK_STEP = 2_000_000_000
"""Coarsest step of a file system's clock in nanoseconds, that of FAT."""


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
        self._known: dict[Path, tuple[Stamp, int, str]] = {}

    def of(self, file: Path) -> str:
        """Hash of the contents; empty where there is no file."""
        now = stamp(file)
        if now is None:
            return ""
        before, hashed_at, found = self._known.get(file, (None, 0, ""))
        if before != now or hashed_at - now[1] < CLOCK_STEP:  # changed again within the same step of the clock?
            hashed_at = time.time_ns()
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            self._known[file] = now, hashed_at, found
        return found


class Generation:
    """Counts how often a watched file was seen changed.

    ComfyUI asks a node for a fingerprint before its linked inputs are known, so a node that is given a stack cannot
    hash the files of the stack then. It watches the files that it has merged before, and answers with this number.

    Args:
        hash_of: content hash of a file.
    """

    def __init__(self, hash_of: Callable[[Path], str]) -> None:
        self._hash_of = hash_of
        self._seen: dict[Path, str] = {}
        self._number = 0

    def watch(self, files: list[Path]) -> None:
        """Watch these files from now on, those watched before as they were."""
        for file in files:
            if file not in self._seen:
                self._seen[file] = self._hash_of(file)

    def number(self) -> int:
        """The number, one more if a file has changed since it was last asked for."""
        changed = {file: now for file, before in self._seen.items() if (now := self._hash_of(file)) != before}
        self._seen |= changed
        self._number += bool(changed)
        return self._number
