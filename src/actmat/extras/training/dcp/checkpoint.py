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
from actmat.checkpoints.source import Format, LocalSource, Source, StoredCheckpoint
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


class DcpCheckpoint(StoredCheckpoint):
    """Model tensors of a distributed checkpoint.

    Args:
        source: the checkpoint, with its config and tokenizer files.
        files: the folder with the metadata: `source` itself or a subfolder.
    """

    format = "dcp"

    def __init__(self, source: Source, files: Source) -> None:
        path = files.fetch(METADATA)
        found = read_metadata(read_bytes(path, most=MAX_METADATA_BYTES), f"{source.location}: {METADATA}")
        part = model_part(found.tensors, found.paths, source.location)
        used = {c.file for fqn in part.names.values() for c in found.tensors[fqn].chunks}
        super().__init__(source, [METADATA, *sorted(used)])
        self._folder = files
        self._stored = {name: found.tensors[fqn] for name, fqn in part.names.items()}
        self._items: dict[tuple[str, int], DcpItem] = {}
        self.notes = part.notes
        self.aliases = MappingProxyType({})
        self.specs = MappingProxyType(self._specs())
        local = {label: files.local(label) for label in self.labels}
        if not files.streams:
            local = {label: path or files.fetch(label) for label, path in local.items()}
        self._reader = FileReader({label: path for label, path in local.items() if path is not None})
        self._local = frozenset(label for label, path in local.items() if path is not None)
        self._check_sizes()

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the metadata and of every file with model tensors."""
        return self._folder.identity(self.labels)

    def close(self) -> None:
        """Close the files."""
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
        sizes = {label: self._reader.size(label) for label in self._local}
        problems = [
            f"tensor {name[:120]!r}: the metadata places it at {c.offset} to {c.offset + c.length} of {c.file}, which "
            f"has {sizes[c.file]} bytes"
            for name, stored in self._stored.items()
            for c in stored.chunks
            if c.file in sizes and c.offset + c.length > sizes[c.file]
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

    def _read_at(self, label: str, offset: int, length: int) -> bytes:
        if label in self._local:
            return self._reader.read(label, offset, length)
        if self._reader.closed:
            raise ValueError(f"{label}: read from a checkpoint that is closed")
        return self._folder.read_range(label, offset, length)

    def _item(self, spec: TensorSpec, stored: DcpTensor, k: int) -> DcpItem:
        """The item of box `k`, cached after the first lookup."""
        key = spec.name, k
        if key not in self._items:
            chunk = stored.chunks[k]
            try:
                item = locate(lambda at, n: self._read_at(chunk.file, at, n), chunk.offset, chunk.length)
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
        """Assemble bytes: by runs if boxes are runs of rows, else by rows of the first axis."""
        if self._reader.closed:
            raise ValueError(f"{self.location}: read from a checkpoint that is closed")
        if not len(out):
            return
        stored = self._stored[spec.name]
        rows = spec.shape[0] if spec.shape else 1
        width = spec.nbytes // rows
        first, last = start // width, -(-(start + len(out)) // width)
        for k, chunk in enumerate(stored.chunks):
            low, high = (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) if spec.shape else (0, 1)
            if high <= first or low >= last:
                continue
            item = self._item(spec, stored, k)
            if chunk.sizes[1:] == spec.shape[1:] and item.is_contiguous:
                self._run(chunk, item, (start, low * width, high * width), out)
            else:
                self._rows(spec, chunk, item, (start, max(low, first), min(high, last)), out)

    def _run(self, chunk: Chunk, item: DcpItem, places: tuple[int, int, int], out: memoryview) -> None:
        """Copy a box of whole rows; `places`: first requested byte, begin and end of the box in bytes."""
        start, low, high = places
        begin, end = max(start, low), min(start + len(out), high)
        target = out[begin - start : end - start]
        if chunk.file in self._local:
            self._reader.read_into(chunk.file, item.start + begin - low, target)
        else:
            target[:] = self._read_at(chunk.file, item.start + begin - low, end - begin)

    def _rows(
        self, spec: TensorSpec, chunk: Chunk, item: DcpItem, places: tuple[int, int, int], out: memoryview
    ) -> None:
        """Copy rows `places[1]` to `places[2]` of a box that does not span the other axes, or is transposed."""
        start, low, high = places
        dtype, inner = torch_dtype(spec.dtype), chunk.sizes[1:]
        per_row = math.prod(inner)
        top = low - (chunk.offsets[0] if spec.shape else 0)
        if item.is_contiguous:
            data = self._read_at(
                chunk.file, item.start + top * per_row * spec.itemsize, (high - low) * per_row * spec.itemsize
            )
            box = torch.frombuffer(bytearray(data), dtype=dtype).view(high - low, *inner)
        else:
            data = self._read_at(chunk.file, item.start, item.span)
            whole = torch.frombuffer(bytearray(data), dtype=dtype).as_strided(item.shape, item.strides)
            box = whole[top : top + high - low].contiguous()
        width = spec.nbytes // spec.shape[0]
        target = torch.frombuffer(out, dtype=torch.uint8)
        first, last = max(low, -(-start // width)), min(high, (start + len(out)) // width)
        if first < last and (first * width - start) % spec.itemsize == 0:  # whole rows, all at once
            rows = target[first * width - start : last * width - start].view(dtype).view(-1, *spec.shape[1:])
            rows[(slice(None), *_slices(chunk))] = box[first - low : last - low]
        else:
            first = last = high
        for row in (*range(low, min(first, high)), *range(max(last, low), high)):
            self._part_of_row(spec, chunk, box[row - low], row * width - start, target)

    @staticmethod
    def _part_of_row(spec: TensorSpec, chunk: Chunk, box: Tensor, begin: int, target: Tensor) -> None:
        """Copy a box's entries of one row into `target`; `begin`: byte of `target` at which the row begins."""
        row = torch.zeros(spec.shape[1:], dtype=box.dtype)
        mask = torch.zeros(spec.shape[1:], dtype=torch.bool)
        row[_slices(chunk)], mask[_slices(chunk)] = box, True
        data = row.view(-1).view(torch.uint8)
        low, high = max(begin, 0), min(begin + data.numel(), target.numel())
        wanted = mask.reshape(-1, 1).expand(-1, spec.itemsize).reshape(-1)[low - begin : high - begin]
        target[low:high][wanted] = data[low - begin : high - begin][wanted]


def _slices(chunk: Chunk) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))


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


def _open(source: Source) -> DcpCheckpoint:
    files = _files_of(source)
    assert files is not None, "the source is claimed"
    return DcpCheckpoint(source, files)


DCP = Format(DcpCheckpoint.format, (METADATA,), claims=lambda source: _files_of(source) is not None, open=_open)
