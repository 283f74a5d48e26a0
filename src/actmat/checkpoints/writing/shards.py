"""Shards of an output: files, headers and offsets as a pure function of names, shapes and dtypes.

The safetensors format: 8 bytes little-endian header length, JSON header, tensor bytes without gaps. Sizes are known
before any tensor is computed, so headers are written first and tensors are written to their offsets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from actmat.checkpoints.base import DTYPES, TensorSpec
from actmat.errors import RecipeError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes of `"5GB"` (powers of ten), `"4GiB"` (powers of two) or a plain number.

    Raises:
        RecipeError: not a size, or more than 8 EiB.
    """
    text = f"{text:x}" if isinstance(text, int) and text >= 2**63 else str(text)  # long integers have no decimal text
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if not 0 < size < 2**63:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise RecipeError(f"A size looks like 5GB, 500MB or 4GiB, up to 8 EiB; got {shown!r}.")
    return size


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: its header bytes (length prefix included), its size, and the place of each tensor in it.

    `stem`: common start of the file names of its checkpoint, folder included. Tensor names in the file lack `prefix`.
    """

    file: str
    header: bytes
    size: int
    specs: dict[str, TensorSpec]
    stem: str = "model"
    prefix: str = ""


def plan_shards(
    specs: Sequence[TensorSpec],
    max_bytes: int,
    *,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
    prefix: str = "",
) -> tuple[Shard, ...]:
    """Fill shards greedily in the given order, none above `max_bytes` unless a single tensor is.

    Within a shard, wider dtypes come first, so that every tensor starts at a multiple of its item size (readers
    that map the file need that). One shard is called `model.safetensors`, several
    `model-00001-of-0000N.safetensors`, as `from_pretrained` expects; `stem` replaces `model`. `metadata` is written
    to every header. In the files, names lack the `prefix` that they have in common.
    """
    groups: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if groups[-1] and used + spec.nbytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(spec)
        used += spec.nbytes
    n = len(groups)
    names = [f"{stem}.safetensors"] if n == 1 else [f"{stem}-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    shards = [_shard(name, group, metadata or {}, prefix) for name, group in zip(names, groups, strict=True)]
    return tuple(replace(shard, stem=stem, prefix=prefix) for shard in shards)


def _shard(file: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str], prefix: str) -> Shard:
    ordered = sorted(specs, key=lambda s: -s.itemsize)  # stable: the given order within one width
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    starts: dict[str, int] = {}
    for spec in ordered:
        offsets = [position, position + spec.nbytes]
        name = spec.name.removeprefix(prefix)
        entries[name] = {"dtype": DTYPES[spec.dtype][1], "shape": list(spec.shape), "data_offsets": offsets}
        starts[spec.name] = position
        position += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = {s.name: replace(s, file=file, offset=len(header) + starts[s.name]) for s in ordered}
    return Shard(file, header, len(header) + position, placed)


def index_files(shards: Sequence[Shard], specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Name and text of the index of every checkpoint that has several shards."""
    out = {}
    for stem in dict.fromkeys(s.stem for s in shards):
        places = {n: s for s in shards if s.stem == stem for n in s.specs}
        if len({s.file for s in places.values()}) < 2:
            continue
        weight_map = {n.removeprefix(s.prefix): s.file.rpartition("/")[2] for n, s in places.items()}
        of_stem = [s for s in specs if s.name in places]
        metadata = {"total_size": sum(s.nbytes for s in of_stem), "total_parameters": sum(s.numel for s in of_stem)}
        text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
        out[f"{stem}.safetensors.index.json"] = text
    return out
