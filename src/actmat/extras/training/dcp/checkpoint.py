"""Checkpoints of torch.distributed.checkpoint (DCP): a `.metadata` and `*.distcp` files.

FSDP, torchtitan and accelerate (`pytorch_model_fsdp_0` in a checkpoint's folder) write them. A tensor is cut into
boxes, one per rank that held a part of it. Opening reads only the metadata; a range of a tensor is assembled from the
rows of its boxes, for any sharded axes.
"""

from __future__ import annotations

import math
import re
from types import MappingProxyType

import torch
from torch import Tensor

from actmat.bounds import read_bytes
from actmat.checkpoints.base import DTYPES, FileIdentity, TensorSpec, torch_dtype
from actmat.checkpoints.files import FileReader
from actmat.checkpoints.formats.pickles import PickleError
from actmat.checkpoints.model import Format, Model, stored_model
from actmat.checkpoints.source import LocalSource, Source, TensorFiles
from actmat.errors import CheckpointError
from actmat.extras.training.dcp.items import DcpItem, locate
from actmat.extras.training.dcp.metadata import Chunk, DcpTensor, read_metadata
from actmat.extras.training.dcp.names import model_part

METADATA = ".metadata"
MAX_METADATA_BYTES = 1_000_000_000
FOREIGN = "common.pt"
"""File of Megatron-core, whose stacked layers and packed projections are not supported; such folders are refused."""
NESTED = re.compile(r"pytorch_model_fsdp_\d+|model")
"""Subfolders in which accelerate and torch's trainers store the model."""


class DcpFiles(TensorFiles):
    """Model tensors of a distributed checkpoint.

    Args:
        source: the checkpoint, with its config and tokenizer files.
        files: the folder with the metadata: `source` itself or a subfolder.
    """

    def __init__(self, source: Source, files: Source) -> None:
        path = files.fetch(METADATA)
        metadata = read_metadata(read_bytes(path, most=MAX_METADATA_BYTES), f"{source.location}: {METADATA}")
        part = model_part(metadata.tensors, metadata.paths, source.location)
        used = {c.file for fqn in part.names.values() for c in metadata.tensors[fqn].chunks}
        super().__init__(source, [METADATA, *sorted(used)])
        self._folder = files
        self._stored = {name: metadata.tensors[fqn] for name, fqn in part.names.items()}
        self._items: dict[tuple[str, int], DcpItem] = {}
        self.notes = part.notes
        self.specs = MappingProxyType(self._specs())
        self._reader = FileReader({label: files.fetch(label) for label in self.labels})
        self._check_sizes()

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the metadata and of every file with model tensors."""
        return self._folder.identity(self.labels)

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._reader.close()

    def _specs(self) -> dict[str, TensorSpec]:
        problems = [
            f"tensor {n[:120]!r} has the unsupported dtype torch.{t.dtype}"
            for n, t in self._stored.items()
            if t.dtype not in DTYPES
        ]
        if problems:
            raise CheckpointError(f"{self.location}: tensors cannot be used", problems)

        def first(name: str) -> tuple[str, int]:
            chunks = self._stored[name].chunks
            return (chunks[0].file, chunks[0].offset) if chunks else ("", 0)

        return {
            name: TensorSpec(name, self._stored[name].shape, self._stored[name].dtype, *first(name))
            for name in sorted(self._stored, key=first)
        }

    def _check_sizes(self) -> None:
        """Raise if a file ends before an item does."""
        sizes = {label: self._reader.size(label) for label in self.labels}
        problems = [
            f"tensor {name[:120]!r}: the metadata places it at {c.offset} to {c.offset + c.length} of {c.file}, which "
            f"has {sizes[c.file]} bytes"
            for name, stored in self._stored.items()
            for c in stored.chunks
            if c.offset + c.length > sizes[c.file]
        ]
        problems += [
            f"tensor {name[:120]!r}: its part of the shape {c.sizes} cannot be in {c.length} bytes of {c.file}"
            for name, stored in self._stored.items()
            for c in stored.chunks
            if math.prod(c.sizes) * torch_dtype(stored.dtype).itemsize > c.length
        ]
        if problems:
            self._reader.close()
            raise CheckpointError(
                f"{self.location}: files are shorter than the metadata says. Likely cause: an interrupted save or "
                "download. Fix: fetch the folder again, or use the previous checkpoint.",
                problems,
            )

    def _item(self, spec: TensorSpec, stored: DcpTensor, k: int) -> DcpItem:
        """The item of box `k`, cached after the first lookup."""
        key = spec.name, k
        if key not in self._items:
            chunk = stored.chunks[k]
            try:
                item = locate(lambda at, n: self._reader.read(chunk.file, at, n), chunk.offset, chunk.length)
                if (item.dtype, item.shape) != (stored.dtype, chunk.sizes):
                    raise PickleError(f"{item.dtype} {item.shape}, but the metadata has {stored.dtype} {chunk.sizes}")
            except PickleError as error:
                raise CheckpointError(
                    f"{self.location}: tensor {spec.name[:120]!r} in {chunk.file} at {chunk.offset}: expected a tensor "
                    f"of torch.save, found {error}. Likely cause: a damaged file, or an extension of the writer. "
                    "Fix: fetch the folder again, or save it with torch's default writer."
                ) from None
            self._items[key] = item
        return self._items[key]

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Assemble bytes: by runs if all boxes are runs of rows, else in whole rows of the first axis."""
        if self._reader.closed:
            raise ValueError(f"{self.location}: read from a checkpoint that is closed")
        if not len(out):
            return
        stored, shape = self._stored[spec.name], spec.shape or (1,)
        width = spec.nbytes // shape[0]
        first, last = start // width, -(-(start + len(out)) // width)
        parts = []
        for k, chunk in enumerate(stored.chunks):
            low, high = (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) if spec.shape else (0, 1)
            if low < last and high > first:
                parts.append((chunk, self._item(spec, stored, k), low, high))
        if all(chunk.sizes[1:] == spec.shape[1:] and item.is_contiguous for chunk, item, *_ in parts):
            for chunk, item, low, high in parts:
                begin, end = max(start, low * width), min(start + len(out), high * width)
                self._reader.read_into(chunk.file, item.start + begin - low * width, out[begin - start : end - start])
            return
        is_whole = (first * width, last * width) == (start, start + len(out))
        data = out if is_whole else memoryview(bytearray((last - first) * width))
        rows = torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype(spec.dtype)).view(-1, *shape[1:])
        for chunk, item, low, high in parts:
            begin, end = max(low, first), min(high, last)
            inner = tuple(slice(o, o + s) for o, s in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
            rows[(slice(begin - first, end - first), *inner)] = self._rows(chunk, item, begin - low, end - low)
        if not is_whole:
            out[:] = data[start - first * width :][: len(out)]

    def _rows(self, chunk: Chunk, item: DcpItem, low: int, high: int) -> Tensor:
        """Rows of a box."""
        dtype = torch_dtype(item.dtype)
        if not item.is_contiguous:
            data = self._reader.read(chunk.file, item.start, item.span)
            return torch.frombuffer(bytearray(data), dtype=dtype).as_strided(item.shape, item.strides)[low:high]
        width = math.prod(chunk.sizes[1:]) * dtype.itemsize
        data = self._reader.read(chunk.file, item.start + low * width, (high - low) * width)
        return torch.frombuffer(bytearray(data), dtype=dtype).view(high - low, *chunk.sizes[1:])


def _files_of(source: Source) -> Source | None:
    """The folder with the metadata: the source itself, or the only known subfolder of a local source."""
    if source.named is not None or FOREIGN in source.names:
        return None
    if METADATA in source.names:
        return source
    if not isinstance(source, LocalSource) or source.directory is None:
        return None
    nested = [n for n in source.names if NESTED.fullmatch(n) and (source.directory / n / METADATA).is_file()]
    return LocalSource(source.directory / nested[0], source.location) if len(nested) == 1 else None


def _open(source: Source) -> Model:
    files = _files_of(source)
    assert files is not None, "the source is claimed"
    return stored_model(DcpFiles(source, files))


DCP = Format(claims=lambda source: _files_of(source) is not None, open=_open)
