"""`Tensors`: named tensors in storage, listed from headers, read one at a time.

`actmat.extras.conformance.tensors` is the shipped test-suite of this contract; `resolve.open_tensors` opens a location.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from actmat.checkpoints.raw import raw_bytes
from actmat.errors import CheckpointError, did_you_mean, format_size
from actmat.foreign import terminal

DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float64": (torch.float64, "F64"),
    "float32": (torch.float32, "F32"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
    "float8_e4m3fn": (torch.float8_e4m3fn, "F8_E4M3"),
    "float8_e5m2": (torch.float8_e5m2, "F8_E5M2"),
    "int64": (torch.int64, "I64"),
    "int32": (torch.int32, "I32"),
    "int16": (torch.int16, "I16"),
    "int8": (torch.int8, "I8"),
    "uint8": (torch.uint8, "U8"),
    "uint16": (torch.uint16, "U16"),
    "uint32": (torch.uint32, "U32"),
    "uint64": (torch.uint64, "U64"),
    "bool": (torch.bool, "BOOL"),
}
"""dtype name -> (torch dtype, safetensors code): the one table of dtypes in the project."""


MAX_DID_YOU_MEAN = 2000
"""Most tensors that are searched for similar names."""


def torch_dtype(name: str) -> torch.dtype:
    """torch dtype of a dtype name."""
    return DTYPES[name][0]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one stored tensor, and the file that holds it; no data."""

    name: str
    shape: tuple[int, ...]  # sizes, slowest axis first
    dtype: str  # a key of `DTYPES`
    # file name relative to the folder (or a label such as `"<memory>"`), for messages and the order of reading
    file: str
    offset: int = 0  # position of the first byte in that file where the format has one, else 0

    @property
    def numel(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per entry."""
        return int(torch_dtype(self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.itemsize

    @property
    def is_floating(self) -> bool:
        """True for floating-point entries (float8 included)."""
        return torch_dtype(self.dtype).is_floating_point

    def empty(self) -> Tensor:
        """Uninitialized CPU tensor of this shape and dtype. Torch's CPU allocator aligns it to 64 bytes."""
        return torch.empty(self.shape, dtype=torch_dtype(self.dtype))


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Size and times of a file, by which a change is detected without reading it.

    `change_ns` (ctime) cannot be set by a user, so an edit that keeps size and modification time still shows.
    Remote files have an `etag` instead of times: the content hash on the hub, elsewhere what the server states.
    """

    path: str
    size: int
    modified_ns: int = 0
    change_ns: int = 0
    etag: str = ""


def versions_of_files(files: Iterable[FileIdentity]) -> tuple[tuple[str, int, str], ...]:
    """Name, size and version of the files that have one: those of remote storage. For handles."""
    return tuple((f.path.rpartition("/")[2], f.size, f.etag) for f in files if f.etag)


@dataclass(frozen=True, slots=True)
class TensorsHandle:
    """Address from which `resolve.open_handle` opens tensors again, also in another process: it can be pickled.

    Tensors that are made of others are `make([*sources], *arguments)`.
    """

    address: str  # absolute path of a folder or file, `hf://org/name@commit`, a URL, or a stack of these
    location: str  # what the user called it, for messages
    streams: bool = False  # remote tensors are read by ranges
    etags: tuple[tuple[str, int, str], ...] = ()  # name, size and version of remote files, which must be the same
    make: Callable[..., Tensors] | None = None
    sources: tuple[TensorsHandle, ...] = ()
    arguments: tuple[Any, ...] = ()


class Tensors(AbstractContextManager["Tensors"]):
    """Named tensors in storage, read lazily. Thread-safe for reading. Use as a context manager.

    Attributes:
        location: what the user called it, for messages ("./experts/math", "org/name@rev").
        specs: name -> spec, in storage order (file by file, by offset).
        aliases: name -> name of the tensor that shares its storage, where the format records that (torch files).
            An alias has a spec too.
    """

    location: str
    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str] = MappingProxyType({})

    @property
    def buffer_bytes(self) -> int:
        """Most bytes that each reading thread takes for read-ahead; 0 for local files."""
        return 0

    @abc.abstractmethod
    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a tensor from byte `start` on; the caller has checked the range."""

    @abc.abstractmethod
    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of every weight file, for fingerprints; reads no tensor."""

    def parts(self, name: str) -> tuple[tuple[TensorSpec, ...], str]:
        """The stored tensors that make up a tensor, and a description of their codes: itself, if it is not coded."""
        return (self.specs[name],), ""

    def prefetch(self, names: Iterable[str]) -> None:
        """Hint that these tensors will be read soon (disk read-ahead). Never fails."""

    def handle(self) -> TensorsHandle:
        """Address from which another process can open these tensors again; an error if in memory."""
        raise CheckpointError(
            f"{self.location}: tensors in memory cannot be opened by another process. Fix: save them (save_pretrained, "
            "safetensors.torch.save_file) and give the folder or file."
        )

    @abc.abstractmethod
    def close(self) -> None:
        """Close the files. Reading afterwards raises `ValueError`. May be called twice."""

    @final
    def find_spec(self, name: str) -> TensorSpec:
        """Spec of a tensor; the error for a missing one suggests the most similar name."""
        spec = self.specs.get(name)
        if spec is None:
            near = did_you_mean(name, self.specs) if len(self.specs) <= MAX_DID_YOU_MEAN else ""
            raise CheckpointError(f"{self.location}: no tensor {name!r} in this checkpoint.{near}")
        return spec

    @final
    def read(self, name: str) -> Tensor:
        """The whole tensor: CPU, contiguous, storage dtype, newly allocated."""
        spec = self.find_spec(name)
        tensor = spec.empty()
        self.fill(spec, 0, raw_bytes(tensor))
        return tensor

    @final
    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the tensor's row-major bytes from byte `start` on.

        Raises:
            ValueError: bytes outside the tensor, or a buffer that is not plain writable bytes.
        """
        spec = self.find_spec(name)
        if out.readonly or out.itemsize != 1 or not out.c_contiguous:
            raise ValueError("read_into needs a writable, contiguous memoryview of one-byte items: use .cast('B')")
        if start < 0 or start + len(out) > spec.nbytes:
            raise ValueError(
                f"tensor {spec.name!r} has {spec.nbytes} bytes; bytes {start} to {start + len(out)} were requested"
            )
        self.fill(spec, start, out)

    def __repr__(self) -> str:
        specs = getattr(self, "specs", {})
        size = format_size(sum(s.nbytes for s in specs.values()))
        return f"<{type(self).__name__} {terminal(getattr(self, 'location', ''))}: {len(specs)} tensors, {size}>"

    def __exit__(self, *error: object) -> None:
        self.close()


class View(Tensors):
    """Tensors that are made of others, which it closes.

    Args:
        sources: the others; the location is that of the first.
        arguments: with which, after the sources, its class makes the same tensors in another process; plain data.
    """

    def __init__(self, sources: Sequence[Tensors], *arguments: Any) -> None:
        self.sources, self.location = tuple(sources), sources[0].location
        self._arguments = arguments

    @property
    def buffer_bytes(self) -> int:
        """Sum over all sources, because each may read ahead."""
        return sum(source.buffer_bytes for source in dict.fromkeys(self.sources))

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the files of all sources."""
        return tuple(dict.fromkeys(file for source in self.sources for file in source.identity()))

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on to the first source."""
        self.sources[0].prefetch(names)

    def handle(self) -> TensorsHandle:
        """Addresses of all sources, with the arguments; the first is its own."""
        sources = tuple(source.handle() for source in self.sources)
        return TensorsHandle(
            sources[0].address, self.location, make=type(self), sources=sources, arguments=self._arguments
        )

    def close(self) -> None:
        """Close all sources."""
        for source in self.sources:
            source.close()
