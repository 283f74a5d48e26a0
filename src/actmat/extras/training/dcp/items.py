"""One item of a `.distcp` file: a tensor written by `torch.save`; only the needed bytes are read.

An item is a zip archive inside the file. Its directory and its pickle, a few kilobytes, locate the entries.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.formats.pickles import Inert, PickleError, parse_pickle

STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
REBUILD = {f"torch._utils _rebuild_tensor_v{k}": k for k in (2, 3)}
PARAMETER = "torch._utils _rebuild_parameter"
_DTYPES = "float8_e4m3fn float8_e5m2 uint16 uint32 uint64 bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8"
ALLOWED = frozenset(
    [*REBUILD, PARAMETER, "collections OrderedDict", "torch.storage UntypedStorage", "torch UntypedStorage"]
    + [f"torch {n}" for n in (*STORAGES, *_DTYPES.split(), "bool", "Size")]
)
MAX_PICKLE_BYTES = 1_000_000
LOCAL_HEADER = 30
"""Length of a zip's local header before name and extra field, in bytes."""

DAMAGED = (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, LookupError, OSError)

ReadAt = Callable[[int, int], bytes]
"""`(offset, length)` in the file -> bytes."""


@dataclass(frozen=True, slots=True)
class DcpItem:
    """Entries of an item: dtype, shape, strides in entries, and file offset of the first entry."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def is_contiguous(self) -> bool:
        """True if the entries are in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def span(self) -> int:
        """Number of bytes from the first entry to the last."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * int(torch_dtype(self.dtype).itemsize) if math.prod(self.shape) else 0


def locate(read_at: ReadAt, offset: int, length: int) -> DcpItem:
    """Find the entries of the tensor in the item at `offset`; reads its directory and its pickle.

    Raises:
        PickleError: the item is not a plain tensor of `torch.save`.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(read_at, offset, length))) as archive:
            records = {r.filename.partition("/")[2]: r for r in archive.infolist()}
            pickled = records["data.pkl"]
            if any(r.compress_type != zipfile.ZIP_STORED for r in records.values()):
                raise PickleError("a compressed record")
            # check both sizes: the stored one is used for reading
            sizes = [s for r in (pickled, records.get("byteorder", pickled)) for s in (r.file_size, r.compress_size)]
            if max(sizes) > MAX_PICKLE_BYTES:
                raise PickleError(f"a description of {max(sizes)} bytes")
            if "byteorder" in records and archive.read(records["byteorder"])[:6] != b"little":
                raise PickleError("entries in big-endian order")
            dtype, key, first, shape, strides = _described(parse_pickle(archive.read(pickled), ALLOWED))
            data = records[f"data/{key}"]
    except DAMAGED as error:
        raise PickleError(f"a damaged item ({str(error)[:120]})") from None
    header = read_at(offset + data.header_offset, LOCAL_HEADER)
    inside = data.header_offset + LOCAL_HEADER + int.from_bytes(header[26:28], "little")
    inside += int.from_bytes(header[28:30], "little")
    start = inside + first * int(torch_dtype(dtype).itemsize)
    item = DcpItem(dtype, shape, strides, offset + start)
    if start + item.span > min(inside + data.file_size, length):
        raise PickleError(f"entries beyond its {data.file_size} bytes")
    return item


def _described(value: Any) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """Dtype, storage, first entry, shape and strides of a pickled tensor or parameter."""
    if isinstance(value, Inert) and value.name == PARAMETER and value.args:
        value = value.args[0]
    if not isinstance(value, Inert) or value.name not in REBUILD or len(value.args) < 6:
        raise PickleError(f"{value!r:.120} instead of a tensor")
    storage, first, shape, strides, *rest = value.args
    mark = storage.args[0] if isinstance(storage, Inert) and storage.name == "persistent" else ()
    if not isinstance(mark, tuple) or len(mark) != 5 or mark[0] != "storage" or not isinstance(mark[1], Inert):
        raise PickleError("a tensor without a storage")
    dtype = STORAGES.get(mark[1].name.rpartition(" ")[2], "")
    if REBUILD[value.name] == 3 and len(rest) > 2 and isinstance(rest[2], Inert):
        dtype = rest[2].name.rpartition(" ")[2]
    sizes = (*_counts(shape), *_counts(strides), first)
    if not dtype or not isinstance(mark[2], str) or len(_counts(shape)) != len(_counts(strides)):
        raise PickleError(f"a tensor in a storage of the kind {mark[1]!r:.80}")
    if not all(isinstance(n, int) and 0 <= n < 2**48 for n in sizes):
        raise PickleError("a tensor of negative or enormous size")
    return dtype, mark[2], first, _counts(shape), _counts(strides)


def _counts(value: Any) -> tuple[int, ...]:
    if isinstance(value, Inert) and value.name == "torch Size" and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple) or len(value) > 16:
        raise PickleError("an invalid shape")
    return value


class _Window(io.RawIOBase):
    """File object restricted to one item."""

    def __init__(self, read_at: ReadAt, offset: int, length: int) -> None:
        self._read_at, self._offset, self._length = read_at, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        if count:
            buffer[:count] = self._read_at(self._offset + self._at, count)
            self._at += count
        return count
