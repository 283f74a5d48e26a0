"""Content hashes of byte streams and files.

XXH3-128 (https://xxhash.com) runs at memory speed on one core, so that hashing every byte read and written costs
little compared with moving it. It detects damage and mix-ups, not an adversary; `sha256_file` is the hash that hubs
use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import xxhash

HASH_NAME = "xxh3_128"


class ContentHash:
    """Running XXH3-128 of a byte stream; releases the GIL on large buffers.

    >>> content = ContentHash()
    >>> content.update(b"abc")
    >>> content.size, content.hexdigest()
    (3, '06b05ab6733a618578af5f94892f3950')
    """

    __slots__ = ("_state", "size")

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self.size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._state.update(data)
        self.size += len(data)

    def hexdigest(self) -> str:
        """32 hexadecimal digits of everything seen so far."""
        return str(self._state.hexdigest())


def hash_names(pairs: Iterable[tuple[str, str]]) -> str:
    """Hash of a whole checkpoint: XXH3-128 over `name NUL digest LF` of its tensors, sorted by name.

    Independent of shards, file order and storage layout: two checkpoints with equal tensors have equal hashes.
    """
    total = ContentHash()
    for name, digest in sorted(pairs):
        total.update(f"{name}\0{digest}\n".encode())
    return total.hexdigest()


def hash_file(path: Path) -> str:
    """XXH3-128 of a file's bytes."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as the hub computes it for large files."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
