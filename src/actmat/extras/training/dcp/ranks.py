"""Parts of ranks in safetensors, as torch's `HuggingFaceStorageWriter` saves them (`save_distributed=True`).

Each rank writes `shard-00001-model-00001-of-00001.safetensors`; where a tensor is cut, the part lies under the tensor's
name, and `DCP_SHARDING_INFO` in the file's metadata has its offsets. Nothing else says what the whole is: its shape is
that of all parts together. Source: torch, `distributed/checkpoint/hf_storage.py`.
"""

from __future__ import annotations

import json
import re
from functools import partial
from types import MappingProxyType
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.files import FileReader
from actmat.checkpoints.folder import shown
from actmat.checkpoints.header import read_header
from actmat.checkpoints.source import Format, Source, StoredCheckpoint
from actmat.errors import CheckpointError
from actmat.extras.training.dcp.checkpoint import DcpCheckpoint
from actmat.extras.training.dcp.items import Item
from actmat.extras.training.dcp.metadata import MAX_AXES, Chunk, StoredTensor, covers

PART = re.compile(r"shard-(?P<rank>\d{5})-model-(?P<file>\d{5})-of-(?P<count>\d{5})\.safetensors")
KEY, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


class RankShardsCheckpoint(DcpCheckpoint):
    """Tensors put together from the parts of all ranks; files that are not local are downloaded."""

    format = "rank shards"

    def __init__(self, source: Source) -> None:
        labels = sorted(n for n in source.weights if PART.fullmatch(n))
        StoredCheckpoint.__init__(self, source, labels)
        self._folder = source
        self._items: dict[tuple[str, int], Item] = {}
        self.aliases = MappingProxyType({})
        self._reader = FileReader({label: source.fetch(label) for label in labels})
        self._local = frozenset(labels)
        try:
            self._stored = self._joined(_ranks_of(labels, source.location))
            self.specs = MappingProxyType(self._specs())
        except CheckpointError:
            self._reader.close()
            raise

    def _joined(self, ranks: int) -> dict[str, StoredTensor]:
        """Every tensor, of the parts that the headers list."""
        found: dict[str, list[tuple[str, Chunk]]] = {}
        problems: list[str] = []
        for label in self.labels:
            header = read_header(partial(self._reader.read, label), self._reader.size(label), file=label)
            offsets = _offsets(header.metadata.get(KEY), f"{self.location}: {label}")
            for name, spec in header.specs.items():
                begin = _numbers(offsets.get(name), len(spec.shape)) if offsets else (0,) * len(spec.shape)
                if begin is None:
                    problems.append(f"{label}: tensor {name[:120]!r} {list(spec.shape)} has no offsets in '{KEY}'")
                    continue
                chunk = Chunk(begin, spec.shape, label, spec.offset, spec.nbytes)
                found.setdefault(name, []).append((spec.dtype, chunk))
        out = {}
        for name, parts in found.items():
            joined = _tensor(parts)
            if isinstance(joined, str):
                problems.append(f"tensor {name[:120]!r}: {joined}")
            else:
                out[name] = joined
        if problems:
            raise CheckpointError(
                f"{self.location}: parts of {ranks} ranks that do not make up tensors. Likely cause: a rank's file is "
                "missing, or files of two saves. Fix: fetch the whole folder, or take the checkpoint before",
                problems,
            )
        self.notes = (
            f"tensors are put together from the files of {ranks} ranks, which do not say how many there were; a "
            "missing last rank shows in their shapes only",
        )
        return out

    def _item(self, spec: TensorSpec, stored: StoredTensor, k: int) -> Item:
        """A part lies in its file as it is: in row-major order, from its offset on."""
        chunk = stored.chunks[k]
        strides, size = [], 1
        for length in reversed(chunk.sizes):
            strides.append(size)
            size *= length
        return Item(stored.dtype, chunk.sizes, tuple(reversed(strides)), chunk.offset)


def _ranks_of(labels: list[str], location: str) -> int:
    """The number of ranks that have files.

    Raises:
        CheckpointError: files of a rank between them are missing.
    """
    ranks = sorted({int(label[6:11]) for label in labels})
    missing = sorted(set(range(1, ranks[-1] + 1)) - set(ranks))
    if missing:
        raise CheckpointError(
            f"{location}: expected the files of {ranks[-1]} ranks, found none of rank {missing[0]}. Fix: fetch the "
            "whole folder, or take the checkpoint before."
        )
    return len(ranks)


def _offsets(text: str | None, where: str) -> dict[str, Any]:
    """Tensor -> entry with its offsets; empty for a file without: its tensors are whole."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: expected a JSON object in '{KEY}', found {shown(text)}")
    return found


def _numbers(entry: Any, axes: int) -> tuple[int, ...] | None:
    listed = entry.get(OFFSETS) if isinstance(entry, dict) else None
    if not isinstance(listed, list) or len(listed) != axes or axes > MAX_AXES:
        return None
    good = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**48 for n in listed)
    return tuple(listed) if good else None


def _tensor(parts: list[tuple[str, Chunk]]) -> StoredTensor | str:
    """The tensor that parts make up, or why they do not."""
    dtypes = {dtype for dtype, _ in parts}
    axes = {len(chunk.sizes) for _, chunk in parts}
    if len(dtypes) > 1 or len(axes) > 1:
        return f"its parts have other dtypes or numbers of axes: {', '.join(sorted(dtypes))}"
    kept = [chunk for _, chunk in parts if 0 not in chunk.sizes] or [parts[0][1]]
    shape = tuple(max(c.offsets[k] + c.sizes[k] for c in kept) for k in range(axes.pop()))
    if not covers([(c.offsets, c.sizes) for c in kept], shape):
        return f"its {len(kept)} parts do not make up the shape {list(shape)}, each entry once"
    return StoredTensor(shape, dtypes.pop(), tuple(kept))


def _claims(source: Source) -> bool:
    """True for a folder whose safetensors files are all parts of ranks."""
    found = [n for n in source.weights if n.endswith((".safetensors", ".safetensors.index.json"))]
    return source.named is None and bool(found) and all(PART.fullmatch(n) for n in found)


RANK_SHARDS = Format(
    RankShardsCheckpoint.format, ("shard-00001-model-*.safetensors",), claims=_claims, open=RankShardsCheckpoint
)
