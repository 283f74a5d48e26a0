"""Files of `torch.save`: `pytorch_model.bin`, `.pt`, `.pth`, `.ckpt`, single or sharded.

These files are pickles, which can run code when loaded. They are opened by torch's restricted unpickler
(`weights_only=True`), which builds tensors and plain containers and refuses anything else before it runs.

Zip files (torch >= 1.6) are mapped into memory, so that opening reads no tensor. Legacy files cannot be mapped:
the whole file is loaded when it is opened, and refused if it is larger than the machine's memory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import struct
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from torch import Tensor

from actmat.bounds import open_regular
from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.files import CHANGED, file_identity
from actmat.checkpoints.folder import INDEX_SUFFIX
from actmat.checkpoints.formats.pickles import PickleError, check_pickle
from actmat.checkpoints.memory import MemoryTensors, tensor_specs
from actmat.checkpoints.model import Format, Model, stored_model
from actmat.checkpoints.source import Source, TensorFiles, join_shards
from actmat.errors import CheckpointError, first_names
from actmat.system import total_memory

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
BIN_NAME = "pytorch_model.bin"
BIN_INDEX_SUFFIX = ".bin.index.json"
BIN_INDEX_NAME = "pytorch_model.bin.index.json"
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts put the state dict."""

LEGACY_PICKLES = 5
"""Magic number, protocol, system, state dict, keys of storages."""

ZIP_MAGIC = b"PK\x03\x04"
BLOCKED_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
DAMAGED = (
    pickle.UnpicklingError, zipfile.BadZipFile, struct.error, RuntimeError, EOFError, OSError, ValueError, TypeError,
    LookupError, AttributeError, AssertionError, MemoryError,
)  # fmt: skip
"""Errors of torch's reader on damaged or hostile bytes; it has no error class of its own."""


class TorchFiles(TensorFiles):
    """Tensors of files written by `torch.save`, downloaded when they are opened.

    A mapped file must not shrink while it is open (the system would end the process); a file that changed is refused at
    the next read.
    """

    def __init__(self, source: Source, labels: Sequence[str], weight_map: Mapping[str, str] | None = None) -> None:
        super().__init__(source, labels)
        self._files = {label: source.fetch(label) for label in labels}
        self._opened = {label: file_identity(path) for label, path in self._files.items()}
        states: dict[str, Mapping[Any, Any]] = {}
        for label, path in self._files.items():
            states[label], unread = _load(path, label, self.location)
            if unread:
                self.notes += (f"tensors outside of the state dict in {label} are left out: {first_names(unread)}",)
        shards = {label: tensor_specs(state, label, location=self.location) for label, state in states.items()}
        self.specs = MappingProxyType(join_shards(shards, weight_map, location=self.location))
        self.absent = tuple(n for n in weight_map or () if n not in self.specs)
        self._held = MemoryTensors({n: t for s in states.values() for n, t in s.items()}, location=self.location)
        self.aliases = self._held.aliases

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Copy bytes of the mapped tensor into `out`."""
        if (before := self._opened.get(spec.file)) is not None:
            now = file_identity(self._files[spec.file])
            if (before.size, before.modified_ns) != (now.size, now.modified_ns):
                raise CheckpointError(
                    f"tensor {spec.name!r} in {spec.file}: the file changed since it was opened. {CHANGED}"
                )
        self._held.fill(spec, start, out)

    def close(self) -> None:
        """Release the files."""
        super().close()
        self._held.close()
        self._opened.clear()


def _torch_names(source: Source) -> list[str]:
    return [name for name in source.weights if name.endswith((*TORCH_SUFFIXES, BIN_INDEX_SUFFIX))]


def _open(source: Source) -> Model:
    """Open the named file, else the main file of the source, with the shards that an index names."""
    name = source.named or _main_file(_torch_names(source), source.location)
    if not name.endswith(INDEX_SUFFIX):
        return stored_model(TorchFiles(source, [name]))
    weight_map = source.weight_map(name)
    return stored_model(TorchFiles(source, sorted(set(weight_map.values())), weight_map))


TORCH_FILES = Format(claims=lambda source: bool(_torch_names(source)), open=_open)


def _main_file(names: Sequence[str], location: str) -> str:
    """The index, else `pytorch_model.bin`, else the only one of the torch files found."""
    for name in (BIN_INDEX_NAME, BIN_NAME):
        if name in names:
            return name
    if len(names) != 1:
        raise CheckpointError(
            f"{location}: expected {BIN_INDEX_NAME}, {BIN_NAME} or one torch file, found "
            f"{', '.join(names[:8]) or 'none'}. Fix: give the path of the file that holds the weights."
        )
    return names[0]


def _load(path: Path, label: str, location: str) -> tuple[Mapping[Any, Any], list[str]]:
    """The state dict of one file, and other keys of the file that hold tensors."""
    content = load_torch(path, label, location)
    state, size = _unwrap(content, label, location), path.stat().st_size
    repeated = [n for n, t in state.items() if isinstance(t, Tensor) and t.numel() * t.itemsize > size]
    if repeated:
        raise CheckpointError(
            f"{location}: {label} has {size} bytes, its tensors more: they repeat stored values (torch.expand). Likely "
            "cause: a hostile file. Fix: save {name: tensor.contiguous()} if they are meant.",
            [f"tensor {str(n)[:120]!r} in {label}: {_described(state[n])} of {size}" for n in repeated],
        )
    others = {} if content is state else content
    return state, [str(key) for key, value in others.items() if value is not state and _holds_tensors(value)]


def _holds_tensors(value: Any) -> bool:
    """True for a tensor that is no number, and for anything that has one in it."""
    rest, seen = [value], set[int]()
    while rest:
        item = rest.pop()
        if isinstance(item, Tensor) and item.ndim:
            return True
        if isinstance(item, Mapping | list | tuple) and id(item) not in seen:  # a pickle may hold a list in itself
            seen.add(id(item))
            rest += item.values() if isinstance(item, Mapping) else item
    return False


def _described(tensor: Tensor) -> str:
    return f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}, more than the file's bytes"


def load_torch(path: Path, label: str, location: str) -> Any:
    """The object in a file of `torch.save`, tensors mapped if possible.

    Args:
        path: the file.
        label, location: its name and that of the checkpoint, for messages.

    Raises:
        CheckpointError: no such file, with code in it, damaged, or beyond the bounds.
    """
    with open_regular(path) as file:
        is_zip = file.read(4) == ZIP_MAGIC
        size = os.fstat(file.fileno()).st_size
        try:
            _check_bounds(file, is_zip=is_zip)
        except PickleError as error:
            raise CheckpointError(
                f"{location}: {label} is not a readable torch file: it has {error}. Likely cause: a hostile file, or "
                "a damaged one. Fix: fetch the file again, or save the state dict as safetensors."
            ) from None
    memory = total_memory()
    if not is_zip and size > memory:
        raise CheckpointError(
            f"{location}: {label} is a legacy torch file of {size} bytes, which cannot be mapped and does not fit the "
            f"{memory} bytes of memory. Fix: convert it to safetensors on a larger machine."
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except DAMAGED as error:
        raise _refusal(error, label, location) from error


def _check_bounds(file: IO[bytes], *, is_zip: bool) -> None:
    """Refuse a file that unfolds to more than it holds; damaged ones are left to torch.

    Raises:
        PickleError: with the reason.
    """
    file.seek(0)
    if not is_zip:
        with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=file, mode="r:"):
            raise PickleError("the form of a tar archive, which torch unpacks to the disk")
        file.seek(0)
        for _ in range(LEGACY_PICKLES):
            if not file.peek(1):  # type: ignore[attr-defined]  # a buffered file
                return
            check_pickle(file)
        return
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            packed = [r for r in records if r.compress_type != zipfile.ZIP_STORED or r.file_size != r.compress_size]
            if packed:
                sizes = f"{packed[0].compress_size} bytes that unpack to {packed[0].file_size}"
                raise PickleError(f"the compressed record {packed[0].filename[:120]!r}, {sizes}")
            for record in records:
                if record.filename.endswith("data.pkl"):
                    with archive.open(record) as content:
                        check_pickle(content)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, OSError, EOFError, struct.error):
        return


def _refusal(error: BaseException, label: str, location: str) -> CheckpointError:
    blocked = BLOCKED_GLOBAL.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if blocked or "TorchScript" in str(error):
        content = f"code in it ('{blocked[1]}')" if blocked else "a TorchScript program"
        return CheckpointError(
            f"{location}: expected tensors in {label}, found {content}. Nothing of it was run. Likely cause: a whole "
            "module or trainer state was saved, or the file is hostile. Fix: if you trust it, save its state_dict as "
            "safetensors in a place where running it does no harm, and merge that."
        )
    return CheckpointError(
        f"{location}: {label} is not a readable torch file ({str(error).splitlines()[0][:160] if str(error) else ''}). "
        "Likely cause: an interrupted download, or a Git LFS pointer. Fix: fetch the file again."
    )


def _unwrap(content: Any, label: str, location: str) -> Mapping[Any, Any]:
    """The state dict in the saved object: itself, or the only mapping of tensors under a usual key."""
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{location}: expected a state dict in {label}, found {type(content).__name__}. "
            "Fix: save {name: tensor} (model.state_dict())."
        )
    if any(isinstance(value, Tensor) for value in content.values()):
        return content
    inner = [k for k, v in content.items() if isinstance(v, Mapping) and any(isinstance(t, Tensor) for t in v.values())]
    if len(inner) == 1 and inner[0] in WRAPPERS:
        wrapped: Mapping[Any, Any] = content[inner[0]]
        return wrapped
    raise CheckpointError(
        f"{location}: expected a state dict in {label}, or one under one of {', '.join(WRAPPERS)}; found the keys "
        f"{', '.join(str(k)[:40] for k in list(content)[:8]) or 'of an empty mapping'}"
        f"{f', of which {len(inner)} hold tensors' if inner else ''}. Fix: save the state dict you mean on its own."
    )
