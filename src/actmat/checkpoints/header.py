"""Parser of the safetensors header, safe for hostile files.

A file is `length (8 bytes, little-endian) | header (JSON) | data`. The header maps each tensor's name to its dtype,
shape and `data_offsets = [begin, end)` in the data; `__metadata__` is an optional map of strings. The format forbids
gaps, overlaps and trailing bytes, so that a file has one meaning and no hidden bytes.

The length is checked against the file and a cap before anything is allocated. Everything wrong inside a header is
collected into one error. (https://github.com/huggingface/safetensors, section "Format".)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from actmat.bounds import parse_object
from actmat.checkpoints.base import DTYPES, TensorSpec
from actmat.checkpoints.folder import shown
from actmat.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The cap of the reference implementation."""

PREFIX_BYTES = 8
MAX_BYTES = 2**63 - 1
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
DTYPE_OF_CODE = {code: (name, dtype.itemsize) for name, (dtype, code) in DTYPES.items()}

LIKELY = "Likely cause: an interrupted download or copy. Fix: fetch the file again and compare its checksum."


def read_header(
    read_at: Callable[[int, int], bytes], file_size: int, *, file: str
) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Read and check a header through `read_at(offset, length)`, of a file or HTTP ranges; lists every problem.

    Returns:
        Name -> spec in the order of the data, with offsets from the start of the file; and the `__metadata__` strings.

    Raises:
        CheckpointError: the header is not valid.
    """
    length = header_length(read_at(0, min(PREFIX_BYTES, file_size)), file_size, file=file)
    if sys.byteorder != "little":
        raise CheckpointError(f"{file}: safetensors files are little-endian, this machine is not; use another one")
    text = read_at(PREFIX_BYTES, length)
    if not text.startswith(b"{"):
        raise CheckpointError(f"{file}: expected a safetensors header in JSON, found no opening brace. {LIKELY}")
    entries = parse_object(text, file, unique=True)
    data_start = PREFIX_BYTES + length
    data_size = file_size - data_start
    problems: list[str] = []
    metadata = _metadata(entries.pop("__metadata__", {}), problems, file)
    rows: list[tuple[int, int, TensorSpec]] = []
    for name, entry in entries.items():
        try:
            rows.append(_tensor(name, entry, data_start, data_size, file))
        except ValueError as problem:
            problems.append(f"tensor {shown(name)} in {file}: {problem}")
    rows.sort(key=lambda item: item[:2])
    if not problems:  # one bad entry would show up again as a gap where it should have been
        problems.extend(_gaps(rows, data_size, file))
    if problems:
        raise CheckpointError(f"{file}: the safetensors header is not valid", problems)
    return {spec.name: spec for _, _, spec in rows}, metadata


def header_length(prefix: bytes, file_size: int, *, file: str) -> int:
    """Length of the JSON text, checked against the size of the file and the cap.

    Raises:
        CheckpointError: shorter than a header, or a length beyond the file or the cap.
    """
    length, most = int.from_bytes(prefix[:PREFIX_BYTES], "little"), min(file_size - PREFIX_BYTES, MAX_HEADER_BYTES)
    if len(prefix) < PREFIX_BYTES or length > most:
        raise CheckpointError(
            f"{file}: expected a safetensors file, found {file_size} bytes that claim a header of {length}, at most "
            f"{max(most, 0)} are possible. Likely cause: an interrupted download or copy, or another kind of file (a "
            "Git LFS pointer, an HTML error page, a pickle). Fix: fetch the real file, and compare its checksum."
        )
    return length


def _metadata(value: Any, problems: list[str], file: str) -> dict[str, str]:
    if not isinstance(value, dict):
        problems.append(f"{file}: __metadata__ must be a map of strings, found {type(value).__name__}")
        return {}
    for key, item in value.items():
        if not isinstance(item, str):
            problems.append(
                f"{file}: __metadata__ must be a map of strings, found {type(item).__name__} at {shown(key)}"
            )
        elif not (_is_text(key) and _is_text(item)):
            problems.append(f"{file}: __metadata__ at {shown(key)} holds half of a surrogate pair, which is not text")
    return value


def _is_text(value: str) -> bool:
    """False for text with half of a surrogate pair, which no file can hold."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def _tensor(name: str, entry: Any, data_start: int, data_size: int, file: str) -> tuple[int, int, TensorSpec]:
    """`(begin, end, spec)` of one entry; raises `ValueError`."""
    if not _is_text(name):
        raise ValueError("the name holds half of a surrogate pair, which is not text")
    if not isinstance(entry, dict) or entry.keys() != ENTRY_KEYS:
        raise ValueError("expected exactly dtype, shape and data_offsets")
    code = entry["dtype"]
    if not isinstance(code, str) or code not in DTYPE_OF_CODE:
        raise ValueError(f"dtype {shown(code)} is not supported; supported: {', '.join(DTYPE_OF_CODE)}")
    dtype, itemsize = DTYPE_OF_CODE[code]
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _is_sizes(shape):
        raise ValueError(f"shape {shown(shape)} is not a list of non-negative integers")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"data_offsets {shown(offsets)} are not two non-negative integers")
    nbytes = _nbytes(shape, itemsize)
    begin, end = offsets
    if begin > end or end > data_size:
        raise ValueError(f"data_offsets [{begin}, {end}] do not lie in the {data_size} bytes of data. {LIKELY}")
    if end - begin != nbytes:
        raise ValueError(f"{dtype} {shown(shape)} takes {nbytes} bytes, data_offsets give it {end - begin}")
    return begin, end, TensorSpec(name, tuple(shape), dtype, file, data_start + begin)


def _is_sizes(value: Any) -> bool:
    # `type is int`: a bool is an int to Python, not to JSON
    if not isinstance(value, list):
        return False
    for n in value:  # noqa: SIM110 - a generator would take a tenth of the time of planning
        if type(n) is not int or not 0 <= n <= MAX_BYTES:
            return False
    return True


def _nbytes(shape: list[int], itemsize: int) -> int:
    """Bytes of a tensor; the product of its non-zero sizes must fit 63 bits, as torch's strides must."""
    total = itemsize
    for size in shape:
        total *= size or 1
        if total > MAX_BYTES:
            raise ValueError(f"shape {shown(shape)} overflows 63 bits")
    return 0 if 0 in shape else total


def _gaps(rows: list[tuple[int, int, TensorSpec]], data_size: int, file: str) -> list[str]:
    """Overlaps, gaps and bytes after the last tensor, given entries sorted by offset."""
    problems: list[str] = []
    reached, before = 0, "the start of the data"
    for begin, end, spec in rows:
        if begin < reached:
            problems.append(f"tensor {shown(spec.name)} in {file}: overlaps {before} by {reached - begin} bytes")
        elif begin > reached:
            problems.append(f"tensor {shown(spec.name)} in {file}: {begin - reached} unused bytes before it")
        reached, before = max(reached, end), f"tensor {shown(spec.name)}"
    if reached != data_size:
        problems.append(f"{file}: {data_size - reached} bytes of data follow the last tensor; the format forbids that")
    return problems
