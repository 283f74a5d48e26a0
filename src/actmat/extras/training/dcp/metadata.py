"""The `.metadata` of torch.distributed.checkpoint (DCP): the bytes of every part of every tensor.

The file is a pickle. It is read as inert data (`formats.pickles`): only metadata classes may be named in it, and they
are never called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.base import DTYPES
from actmat.checkpoints.folder import is_plain_name, shown
from actmat.checkpoints.formats.pickles import Inert, PickleError, parse_pickle
from actmat.errors import CheckpointError

_DCP = "torch.distributed.checkpoint"
_SHARD = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES = "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta"
_PATHS = "PosixPath PurePosixPath WindowsPath PureWindowsPath Path"
ALLOWED = frozenset(
    [f"{_DCP}.metadata {n}" for n in (*_CLASSES.split(), "TensorProperties", "_MEM_FORMAT_ENCODING")]
    + [f"{_DCP}.filesystem {n}" for n in ("_StorageInfo", "_StoragePrefix")]
    + [f"{_SHARD} {n}" for n in ("TensorProperties", "MEM_FORMAT_ENCODING")]
    + [f"{module} {n}" for module in ("pathlib", "pathlib._local") for n in _PATHS.split()]
    + [f"torch {n}" for n in (*DTYPES, "Size", "device", "strided", "float8_e4m3fnuz", "float8_e5m2fnuz", "complex64")]
    + ["torch.serialization _get_layout", "collections OrderedDict", "collections defaultdict", "builtins dict"]
)
"""Class names in the metadata of torch 2.0 and later, torchtitan and accelerate."""

MAX_AXES = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the file bytes of its item."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """One tensor: shape, dtype (a torch name) and its boxes, without empty ones."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """Contents of a `.metadata`.

    Args:
        tensors: by fully qualified name.
        paths: name -> keys of the original nested state dict, if recorded.
    """

    tensors: Mapping[str, DcpTensor]
    paths: Mapping[str, tuple[str, ...]]


def read_metadata(content: bytes, where: str) -> DcpMetadata:
    """Parse the metadata from a file's bytes.

    Raises:
        CheckpointError: the metadata is damaged, hostile or of an unknown form, or a tensor's parts do not cover it.
    """
    try:
        root = parse_pickle(content, ALLOWED)
        state = _fields(root, "Metadata")
        listed = _mapping(state.get("state_dict_metadata"), "state_dict_metadata")
        places = _places(_mapping(state.get("storage_data"), "storage_data"))
        tensors = {}
        for name, value in listed.items():
            if not isinstance(name, str):
                raise PickleError("a tensor whose name is not a string")
            if isinstance(value, Inert) and value.name.endswith(" TensorStorageMetadata"):
                tensors[name] = _tensor(name, value, places)
        return DcpMetadata(tensors, _paths(state.get("planner_data")))
    except PickleError as error:
        raise CheckpointError(
            f"{where}: expected the metadata of a distributed checkpoint, found {error}. Nothing in it was run. Likely "
            "cause: a damaged or hostile file, or an unsupported version of torch. Fix: fetch it again, or "
            "convert it where you trust it (python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR OUT)"
        ) from None


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """Attributes of an object of the class `name`."""
    if not isinstance(value, Inert) or value.name.rpartition(" ")[2] != name:
        raise PickleError(f"{type(value).__name__ if not isinstance(value, Inert) else value!r} instead of {name}")
    return _mapping(value.state, name)


def _mapping(value: Any, what: str) -> Mapping[Any, Any]:
    if isinstance(value, Inert) and value.name.startswith("collections "):
        value = value.state or {}
    if not isinstance(value, dict):
        raise PickleError(f"no mapping in {what}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """A `torch.Size`, or a plain tuple or list of sizes."""
    if isinstance(value, Inert) and value.name == "torch Size":
        value = value.args[0] if len(value.args) == 1 else None
    if not isinstance(value, tuple | list) or len(value) > MAX_AXES:
        raise PickleError("an invalid size")
    sizes = tuple(value)
    if not all(isinstance(n, int) and 0 <= n < 2**48 for n in sizes):
        raise PickleError(f"the size {shown(sizes)}")
    return sizes


_Place = tuple[str, int, int]


def _places(listed: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], _Place]:
    """Name and offsets of a chunk -> file, position and length of its item."""
    out: dict[tuple[str, tuple[int, ...]], _Place] = {}
    for key, value in listed.items():
        index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        name, offset = index.get("fqn"), index.get("offset")
        file, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(name, str) or not isinstance(start, int) or not isinstance(length, int):
            raise PickleError("an entry of storage_data without name, offset or length")
        if not is_plain_name(file):
            raise PickleError(f"the file {shown(file)}, which is not a plain name in the folder")
        if start < 0 or length < 0:
            raise PickleError(f"{name[:120]!r} at {start}, {length} bytes long")
        if how := info.get("transform_descriptors"):
            raise PickleError(f"items that were transformed on saving ({shown(how)})")
        if offset is not None:  # None: not a tensor
            out[name, _size(offset)] = (str(file), start, length)
    return out


def _tensor(name: str, value: Inert, places: Mapping[tuple[str, tuple[int, ...]], _Place]) -> DcpTensor:
    fields = _fields(value, "TensorStorageMetadata")
    shape, listed = _size(fields.get("size")), fields.get("chunks")
    if not isinstance(listed, list) or not listed:
        raise PickleError(f"no chunks of {name[:120]!r}")
    chunks = []
    for entry in listed:
        box = _fields(entry, "ChunkStorageMetadata")
        offsets, sizes = _size(box.get("offsets")), _size(box.get("sizes"))
        if 0 in sizes and 0 not in shape:
            continue
        if (place := places.get((name, offsets))) is None:
            raise PickleError(f"no place of the part of {name[:120]!r} at {offsets}")
        chunks.append(Chunk(offsets, sizes, *place))
    if not covers([(c.offsets, c.sizes) for c in chunks], shape):
        raise PickleError(f"parts of {name[:120]!r} that do not cover its shape {shape}")
    return DcpTensor(shape, _dtype(name, fields.get("properties")), tuple(chunks))


def _dtype(name: str, properties: Any) -> str:
    """Dtype name of a `TensorProperties`, whose state is a tuple or, in early versions, a mapping."""
    state = properties.state if isinstance(properties, Inert) else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(dtype, Inert) or not dtype.name.startswith("torch "):
        raise PickleError(f"no dtype of {name[:120]!r}")
    return dtype.name.removeprefix("torch ")


Box = tuple[tuple[int, ...], tuple[int, ...]]


def covers(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """True if the boxes (offsets, sizes) cover the shape exactly once.

    A sharding cuts an axis into intervals, and each of these again along the next axes; anything else is refused.
    """
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        return False
    if not shape:
        return len(boxes) == 1
    groups: dict[tuple[int, int], list[Box]] = {}
    for offsets, sizes in boxes:
        groups.setdefault((offsets[0], sizes[0]), []).append((offsets[1:], sizes[1:]))
    end = 0
    for start, size in sorted(groups):
        if start != end:
            return False
        end += size
    return end == shape[0] and all(covers(inner, shape[1:]) for inner in groups.values())


def _paths(data: Any) -> dict[str, tuple[str, ...]]:
    """Keys of the nested state dict by flat name; empty if not recorded or in an unknown form."""
    if isinstance(data, Inert):
        data = data.state
    if not isinstance(data, dict):
        return {}
    return {
        name: tuple(map(_key, path)) for name, path in data.items() if isinstance(name, str) and isinstance(path, tuple)
    }


def _key(value: Any) -> str:
    if not isinstance(value, str | int):
        raise PickleError(f"a path with {shown(value)}")
    return str(value)
