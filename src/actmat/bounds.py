"""Read files that others wrote: only regular files, whose sizes are checked before anything is parsed.

Checkpoints, recipes, manifests, reports and journals come with downloads or lie in folders that others write to. A
pipe would block its reader, a device has no end, and a small text can describe an object that fills the memory. Every
reader of such files goes through this module; tensors are read by `checkpoints.files`, which checks the same.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from actmat.errors import CheckpointError, MergeError
from actmat.system import BINARY, NONBLOCK

MAX_BYTES = 200_000_000
"""Largest JSON file. The index of a model with 100,000 tensors takes 10 MB."""

MAX_VALUES = 4_000_000
"""Most values in a JSON text; a header of 500,000 tensors has that many. Each takes about 100 bytes."""

MAX_WRITTEN_VALUES = 20_000_000
"""Most values in a manifest or a report, which hold about 100 per tensor."""

MAX_DEPTH = 100
"""Deepest nesting of JSON values; configs and manifests have less than 10."""

MAX_DIGITS = 100
"""Most digits of a whole number in a JSON text; some tokenizers state a length of 10^30."""

MAX_PATH_BYTES = 4095
"""Longest path that Linux takes."""

CHUNK = 1 << 20

URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
"""A scheme has at least two letters: `C://models` is a path on Windows."""

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
    stat.S_IFREG: "a file",
}


def kind_of_file(mode: int) -> str:
    """Words for the kind of a file, from `st_mode`.

    >>> kind_of_file(Path(".").stat().st_mode)
    'a directory'
    """
    return KINDS.get(stat.S_IFMT(mode), "something else")


def is_url(location: object) -> bool:
    """True for text of the form `scheme://...`.

    >>> is_url("s3://bucket/model"), is_url("./model"), is_url("org/name")
    (True, False, False)
    """
    return isinstance(location, str) and URL.match(location) is not None


def local_path(text: str | Path, *, error: type[MergeError] = CheckpointError) -> Path:
    """A path that the system can look up, `~` expanded; it need not exist.

    >>> local_path("merged")
    PosixPath('merged')

    Raises:
        MergeError: empty, too long, not UTF-8, with a NUL, or in the home of an unknown user; of the type `error`.
    """
    path = str(text)
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        shown = path.encode("utf-8", "backslashreplace").decode()[:200]
        raise error(f"{shown}: expected a path in UTF-8, found other bytes. Fix: rename the file.") from None
    if not path or "\0" in path:
        raise error(f"expected a path, found {path[:200]!r}")
    if len(encoded) > MAX_PATH_BYTES or any(len(part) > 255 for part in encoded.split(b"/")):
        raise error(
            f"{path[:60]}...: the path is too long ({len(encoded)} bytes; a name takes at most 255, a path "
            f"{MAX_PATH_BYTES}). Fix: correct or shorten it."
        )
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = path.partition("/")[0]
        raise error(f"{path}: there is no user '{user.removeprefix('~')}' on this machine. Fix: write the full path, "
                    f"or ./{path} for a folder of that name.") from None  # fmt: skip


def list_folder(folder: Path, *, error: type[MergeError] = CheckpointError) -> list[str]:
    """Names in a folder, sorted.

    Raises:
        MergeError: the folder cannot be listed; of the type `error`.
    """
    with _explained(folder, "listed", error):
        return sorted(os.listdir(folder))


@contextmanager
def open_regular(path: Path, *, error: type[MergeError] = CheckpointError) -> Iterator[IO[bytes]]:
    """Open a regular file for reading, without waiting for the writer of a pipe.

    Raises:
        MergeError: missing, unreadable, or not a regular file; of the type `error`.
    """
    with _explained(path, "read", error):
        handle = os.open(path, os.O_RDONLY | NONBLOCK | BINARY)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise error(f"{path}: expected a file, found {kind_of_file(mode)}")
    with os.fdopen(handle, "rb") as file:
        yield file


def read_bytes(path: Path, *, most: int = MAX_BYTES, error: type[MergeError] = CheckpointError) -> bytes:
    """Content of a regular file of at most `most` bytes.

    Raises:
        MergeError: missing, unreadable, not a regular file, or larger; of the type `error`.
    """
    with open_regular(path, error=error) as file, _explained(path, "read", error):
        size = os.fstat(file.fileno()).st_size
        content = bytearray()
        while max(size, len(content)) <= most and (chunk := file.read(min(CHUNK, size + 1))):  # some files lie
            content += chunk
            size = max(size, len(content))
    if size > most:
        raise error(f"{path}: expected at most {most} bytes, found {size} or more; is this the right file?")
    return bytes(content)


def read_object(
    path: Path, *, values: int = MAX_VALUES, unique: bool = False, error: type[MergeError] = CheckpointError
) -> dict[str, Any]:
    """The object in a JSON file; `unique` refuses a key given twice.

    Raises:
        MergeError: unreadable, too large, not JSON, or not an object; of the type `error`.
    """
    return parse_object(read_bytes(path, error=error), str(path), values=values, unique=unique, error=error)


def parse_object(
    text: bytes,
    where: str,
    *,
    values: int = MAX_VALUES,
    unique: bool = False,
    error: type[MergeError] = CheckpointError,
) -> dict[str, Any]:
    """The object that a JSON text holds; see `read_object`.

    >>> parse_object(b'{"a": [1, 2]}', "config.json")
    {'a': [1, 2]}
    """
    check_values(text, where, values=values, error=error)
    try:
        value = parse_json(text, unique=unique)
    except ValueError as problem:
        raise error(
            f"{where}: expected JSON, found {str(problem)[:200]}. Fix: fetch or write the file again."
        ) from problem
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """A JSON value of any kind with the bounds of `read_object`, for short texts.

    Raises:
        ValueError: not JSON in UTF-8, nested too deeply, or with a number of more than `MAX_DIGITS` digits.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        value = json.loads(text, object_pairs_hook=unique_keys if unique else None, parse_int=whole_number)
    except RecursionError:
        raise ValueError(f"values nested more than {MAX_DEPTH} deep") from None
    _check_depth(value)
    return value


def check_values(
    text: bytes, where: str, *, values: int = MAX_VALUES, error: type[MergeError] = CheckpointError
) -> None:
    """Refuse a JSON text with more than `values` values, which would take many times its size in memory.

    Raises:
        MergeError: of the type `error`.
    """
    if len(text) <= values:
        return
    count = sum(map(text.count, (b",", b"[", b"{")))
    if count > values:
        raise error(f"{where}: expected a JSON text of at most {values} values, found about {count}")


def whole_number(text: str) -> float:
    """`parse_int` of `json`: without thousands of digits, and with `-0` as a float, which it is for safetensors."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return -0.0 if text == "-0" else int(text)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` of `json` that refuses a key given twice (`ValueError`)."""
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:120]!r} twice")
            seen.add(key)
    return out


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"values nested more than {MAX_DEPTH} deep")
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [v for values in inner for v in values if isinstance(v, dict | list)]


@contextmanager
def _explained(path: Path, verb: str, error: type[MergeError]) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise error(f"{path}: expected a file, found {kind_of_file(os.stat(path).st_mode)}") from None
        raise error(f"{path}: cannot be {verb}: {problem.strerror}") from problem
