"""Parser of the header of a GGUF file, safe for hostile files.

    "GGUF" | version u32 | tensors u64 | entries u64 | entries | tensors (name, axes, type, offset) | padding | data

Versions 2 and 3, little-endian. Every length is checked against the file and a cap before anything is read; long lists
but that of the tokens are counted and skipped. (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)

A model split into files `NAME-00001-of-00003.gguf`: the first has the metadata, each has its own tensors.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.errors import CheckpointError

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_TENSORS, MOST_ENTRIES = 1_000_000, 100_000
MOST_TEXT = 1 << 24  # bytes; a chat template is one string, and all tokens of a vocabulary take less
VOCABULARY = "tokenizer.ggml.tokens"
MOST_LISTED = 4096  # items kept of a list
MOST_ITEMS = 50_000_000
MOST_AXES = 4
BLOCK = 1 << 16
ALIGNMENT = 32

STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
LIKELY = "Likely cause: an interrupted download, or another format. Fix: fetch it again and compare its checksum."


@dataclass(frozen=True, slots=True)
class SkippedList:
    """Length of a list, and the tokens of a vocabulary; other items are skipped."""

    count: int
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """One tensor: name, shape (slowest axis first), type number, offset in the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key, and tensors in header order."""

    metadata: Mapping[str, Any]
    tensors: tuple[GgufEntry, ...]


class _Damaged(Exception):
    pass


class _Cursor:
    """Reads a header from front to back, a block at a time."""

    def __init__(self, read_at: Callable[[int, int], bytes], size: int) -> None:
        self._read_at, self._size = read_at, size
        self._start, self._block = 0, b""
        self.position = 0

    def take(self, length: int) -> bytes:
        """Read the next bytes."""
        self._check(length)
        low = self.position - self._start
        if low < 0 or low + length > len(self._block):
            self._start = self.position
            self._block = self._read_at(self._start, min(max(length, BLOCK), self._size - self._start))
            low = 0
        self.position += length
        return self._block[low : low + length]

    def skip(self, length: int) -> None:
        """Skip bytes without reading them."""
        self._check(length)
        self.position += length

    def number(self, code: str) -> Any:
        """Read the next number; `code` is a `struct` format."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self, most: int = MOST_TEXT) -> str:
        """Read the next string."""
        return self.take(self.length(most, "a text of")).decode("utf-8", "replace")

    def length(self, most: int, what: str) -> int:
        """Read the next length; raise if above `most`."""
        size = int(self.number("Q"))
        if size > most:
            raise _Damaged(f"{what} {size}, more than {most}")
        return size

    def _check(self, length: int) -> None:
        if length > self._size - self.position:
            raise _Damaged(f"{length} bytes at {self.position}, but the file ends at {self._size}")


def read_gguf_header(read_at: Callable[[int, int], bytes], size: int, *, file: str) -> GgufHeader:
    """Read the header of a GGUF file through `read_at(offset, length)`; tensor sizes are not checked.

    Raises:
        CheckpointError: the file is not GGUF, is damaged, or exceeds the caps.
    """
    cursor = _Cursor(read_at, size)
    try:
        return _header(cursor)
    except _Damaged as error:
        raise CheckpointError(f"{file}: the header declares {error}. {LIKELY}") from None


def _header(cursor: _Cursor) -> GgufHeader:
    magic = cursor.take(4)
    if magic != MAGIC:
        raise _Damaged(f"the magic bytes {magic!r}, expected {MAGIC!r}")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise _Damaged(f"version {version}, expected 2 or 3, little-endian")
    n_tensors = cursor.length(MOST_TENSORS, "a number of tensors,")
    n_entries = cursor.length(MOST_ENTRIES, "a number of entries,")
    metadata: dict[str, Any] = {}
    for _ in range(n_entries):
        key = cursor.text()
        if key in metadata:
            raise _Damaged(f"the entry {key[:120]!r} twice")
        metadata[key] = _value(cursor, cursor.number("I"), keep=key == VOCABULARY)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= BLOCK:
        raise _Damaged(f"an alignment of {str(alignment)[:40]}")
    tensors = [_tensor(cursor) for _ in range(n_tensors)]
    start = -(-cursor.position // alignment) * alignment
    names = {t.name for t in tensors}
    if len(names) < len(tensors):
        raise _Damaged("a tensor twice")
    return GgufHeader(metadata, tuple(GgufEntry(t.name, t.shape, t.type, start + t.offset) for t in tensors))


def _tensor(cursor: _Cursor) -> GgufEntry:
    name = cursor.text()
    axes = cursor.number("I")
    if axes > MOST_AXES:
        raise _Damaged(f"{axes} axes of tensor {name[:120]!r}")
    shape = tuple(cursor.length(1 << 40, f"an axis of tensor {name[:120]!r},") for _ in range(axes))
    return GgufEntry(name, shape[::-1], cursor.number("I"), cursor.number("Q"))


def _value(cursor: _Cursor, kind: int, *, keep: bool) -> Any:
    """Read the next value of type `kind`; a list of texts, of `MOST_TEXT` bytes at most, only if asked."""
    if kind in NUMBERS:
        return cursor.number(NUMBERS[kind])
    if kind == STRING:
        return cursor.text()
    if kind != ARRAY:
        raise _Damaged(f"a value of the unknown type {kind}")
    inner, count = cursor.number("I"), cursor.length(MOST_ITEMS, "a list of")
    if inner in NUMBERS:
        if count > MOST_LISTED:
            cursor.skip(count * struct.calcsize(f"<{NUMBERS[inner]}"))
            return SkippedList(count)
        return [cursor.number(NUMBERS[inner]) for _ in range(count)]
    if inner != STRING:
        raise _Damaged(f"a list of the type {inner}")
    if keep:
        end = cursor.position + MOST_TEXT
        return SkippedList(count, tuple(cursor.text(end - cursor.position) for _ in range(count)))
    for _ in range(count):
        cursor.skip(cursor.length(MOST_TEXT, "a text of"))
    return SkippedList(count)


PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MOST_PARTS = 1000


def parts_of(name: str) -> list[str]:
    """All file names of a split model, in order, from the name of one part; else only the given name.

    >>> parts_of("m-00002-of-00002.gguf")
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    match = PART.fullmatch(name)
    count = 0 if match is None else int(match["count"])
    if match is None or not 1 <= count <= MOST_PARTS:
        return [name]
    return [f"{match['stem']}-{k:05d}-of-{count:05d}.gguf" for k in range(1, count + 1)]


def joined(headers: Sequence[GgufHeader], location: str) -> GgufHeader:
    """Join the headers of all parts.

    Raises:
        CheckpointError: the number or order of the parts, or their tensors, differ from their headers.
    """
    problems = []
    for number, header in enumerate(headers):
        said, place = _number(header, "split.count", 1), _number(header, "split.no", 0)
        if max(1, said) != len(headers):
            problems.append(f"file {number + 1} belongs to {said} parts, but {len(headers)} are present")
        elif place != number:
            problems.append(f"file {number + 1} is numbered {place + 1} in its header")
    first = headers[0]
    tensors = tuple(t for header in headers for t in header.tensors)
    if len({t.name for t in tensors}) < len(tensors):
        problems.append("a tensor is in two files")
    wanted = _number(first, "split.tensors.count", len(tensors))
    if len(headers) > 1 and wanted != len(tensors):
        problems.append(f"expected {wanted} tensors, as the first file says, found {len(tensors)}")
    if problems:
        raise CheckpointError(
            f"{location}: the parts of a split GGUF file are inconsistent. Fix: give the folder with all parts "
            "under their original names, or join them (llama-gguf-split --merge)",
            problems,
        )
    return GgufHeader(first.metadata, tensors)


def _number(header: GgufHeader, key: str, default: int) -> int:
    value: Any = header.metadata.get(key, default)
    return value if isinstance(value, int) else -1
