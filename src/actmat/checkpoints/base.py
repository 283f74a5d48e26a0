"""`Checkpoint`: named tensors in storage, listed from headers, read one at a time.

`actmat.extras.conformance.checkpoints` is the shipped test-suite of this contract; `resolve.open_checkpoint` opens a
location.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.side_files import ModelFiles, SideFiles, side_files_of
from actmat.errors import CheckpointError, did_you_mean, format_size
from actmat.foreign import html_table, terminal

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


SHOWN = 20
"""Most tensors of a checkpoint that a notebook shows."""

MAX_DID_YOU_MEAN = 2000
"""Most tensors that are searched for similar names."""


def torch_dtype(name: str) -> torch.dtype:
    """torch dtype of a dtype name."""
    return DTYPES[name][0]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one stored tensor, and the file that holds it; no data."""

    name: str  # key in the checkpoint
    shape: tuple[int, ...]  # sizes, slowest axis first
    dtype: str  # a key of `DTYPES`
    # file name relative to the checkpoint (or a label such as `"<memory>"`), for messages and the order of reading
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


class View(Protocol):
    """Address of a checkpoint that is made of others: plain data."""

    def open(self, open_handle: Callable[[CheckpointHandle], Checkpoint]) -> Checkpoint:
        """The checkpoint, made of those that `open_handle` gives."""


@dataclass(frozen=True, slots=True)
class CheckpointHandle:
    """Address from which `resolve.open_handle` opens a checkpoint again, also in another process: it can be pickled."""

    address: str  # absolute path of a folder or file, `hf://org/name@commit`, or a URL
    format: str
    location: str  # what the user called it, for messages
    cache_dir: str = ""  # folder of downloads; empty for local files
    streams: bool = False  # remote tensors are read by ranges
    etags: tuple[tuple[str, int, str], ...] = ()  # name, size and version of remote files, which must be the same
    view: View | None = None  # of a checkpoint that is made of others


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """Named tensors in storage, read lazily. Thread-safe for reading. Use as a context manager.

    Attributes:
        location: what the user called it, for messages ("./experts/math", "org/name@rev").
        directory: local folder of config and tokenizer files, or None (single file, memory).
        specs: name -> spec, in storage order (file by file, by offset).
        aliases: name -> name of the tensor that shares its storage, where the format records that (torch files).
            An alias has a spec too.
        notes: remarks for the plan on tensors that were read or left out.
        absent: names that an index lists and no file holds, which only ties can explain (`layout.ties.check_absent`).
        models: locations of the models it is composed of; empty for one stored model.
        keeps_rows: rows of its token tables are those that are stored, with others after them.
        is_composed: composed of checkpoints that are each decoded by their own config.
        written_sidecars: name -> text of files that an output gets instead of copies, such as a new tokenizer's.
        inner: of a view, the stored checkpoint: it has the files, and reads ahead.
    """

    location: str
    directory: Path | None
    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    notes: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    keeps_rows = True
    is_composed = False
    written_sidecars: Mapping[str, str] = MappingProxyType({})
    inner: Checkpoint | None = None

    @property
    @abc.abstractmethod
    def config(self) -> Mapping[str, Any] | None:
        """Parsed `config.json`, or None without one."""

    @property
    def written_config(self) -> Mapping[str, Any] | None:
        """`config.json` to write instead of a copy of the folder's; None if the copy is right."""
        return None

    @property
    def written_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Path in an output -> config to be written there; a pipeline has one for each component that needs it."""
        return {} if self.written_config is None else {"config.json": self.written_config}

    def metadata(self) -> Mapping[str, str]:
        """Texts in the headers of its files; empty for formats without them."""
        return {} if self.inner is None else self.inner.metadata()

    def scheme(self, name: str) -> str:
        """Description of a quantized tensor's layout; empty for any other tensor."""
        return ""

    def stored_specs(self, name: str) -> tuple[TensorSpec, ...]:
        """Specs of the stored tensors that make up a tensor; its own spec if it is not quantized."""
        return (self.specs[name],)

    def stored_bytes(self, name: str) -> int:
        """Bytes read from storage for a tensor; fewer than `nbytes` if it is quantized."""
        return sum(spec.nbytes for spec in self.stored_specs(name))

    @abc.abstractmethod
    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of every weight file, for fingerprints; reads no tensor."""

    def find_spec(self, name: str) -> TensorSpec:
        """Spec of a tensor; the error for a missing one suggests the most similar name."""
        spec = self.specs.get(name)
        if spec is None:
            near = did_you_mean(name, self.specs) if len(self.specs) <= MAX_DID_YOU_MEAN else ""
            raise CheckpointError(f"{self.location}: no tensor {name!r} in this checkpoint.{near}")
        return spec

    def read(self, name: str) -> Tensor:
        """The whole tensor: CPU, contiguous, storage dtype, newly allocated."""
        spec = self.find_spec(name)
        tensor = spec.empty()
        self.fill(spec, 0, raw_bytes(tensor))
        return tensor

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

    @abc.abstractmethod
    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a tensor from byte `start` on; the caller has checked the range."""

    def prefetch(self, names: Iterable[str]) -> None:
        """Hint that these tensors will be read soon (disk read-ahead). Never fails."""
        if self.inner is not None:
            self.inner.prefetch(names)

    @property
    def buffer_bytes(self) -> int:
        """Most bytes that each reading thread takes for read-ahead; 0 for local files."""
        return 0 if self.inner is None else self.inner.buffer_bytes

    def handle(self) -> CheckpointHandle:
        """Address from which another process can open this checkpoint again; an error if in memory."""
        raise CheckpointError(
            f"{self.location}: tensors in memory cannot be opened by another process. Fix: save them (save_pretrained, "
            "safetensors.torch.save_file) and give the folder or file."
        )

    def sources(self) -> tuple[ModelFiles, ...]:
        """Files of every model it is composed of; empty for tensors in memory."""
        return () if self.inner is None else self.inner.sources()

    def side_files(self) -> SideFiles:
        """Files of the folder except the weights: those that are copied to an output, and the rest."""
        return side_files_of(self.directory) if self.inner is None else self.inner.side_files()

    def converted_sidecars(self) -> Mapping[str, str]:
        """Name -> text of a tokenizer's files, made from the metadata of a format that stores it; takes seconds."""
        return {} if self.inner is None else self.inner.converted_sidecars()

    def stored_tokens(self) -> Sequence[str]:
        """Tokens by their rows, of a format that stores them beside the weights; empty for others."""
        return () if self.inner is None else self.inner.stored_tokens()

    def fetch_sidecars(self) -> Path | None:
        """Local folder of the side files; a hub checkpoint downloads them first."""
        return self.directory if self.inner is None else self.inner.fetch_sidecars()

    @abc.abstractmethod
    def close(self) -> None:
        """Close the files. Reading afterwards raises `ValueError`. May be called twice."""

    def __repr__(self) -> str:
        specs = getattr(self, "specs", {})
        size = format_size(sum(s.nbytes for s in specs.values()))
        return f"<{type(self).__name__} {terminal(getattr(self, 'location', ''))}: {len(specs)} tensors, {size}>"

    def _repr_html_(self) -> str:
        rows = [(s.name, "x".join(map(str, s.shape)), s.dtype) for s in list(self.specs.values())[:SHOWN]]
        more = [("...", f"{len(self.specs) - SHOWN} more", "")] if len(self.specs) > SHOWN else []
        return str(html_table(repr(self), ("tensor", "shape", "dtype"), [*rows, *more]))

    def __exit__(self, *error: object) -> None:
        self.close()
