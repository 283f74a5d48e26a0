"""From what a user wrote to an open checkpoint.

A location is a folder, a weight file, a hub id `org/name[@revision]`, a mapping of tensors, or a checkpoint that is
open already. What exists locally wins over a hub id, unless that is written `hf://org/name`. Safetensors win over
torch files of the same folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.formats import ADAPTER_WEIGHTS, TORCH_SUFFIXES, foreign_format, weight_format
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.quantisation import quantisation_problems
from actmat.checkpoints.safetensors import open_safetensors
from actmat.checkpoints.torch_files import open_torch_files
from actmat.errors import CheckpointError, did_you_mean

__all__ = ["HUB_ID", "open_checkpoint", "quantisation_problems"]

HUB_ID = re.compile(r"(?P<scheme>hf://)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


def open_checkpoint(
    location: str | Path | Mapping[str, Tensor] | Checkpoint, *, cache_dir: str | Path | None = None
) -> Checkpoint:
    """Open what `location` names; reads headers, no tensor.

    Args:
        location: folder, file, hub id, tensors by name, or an open checkpoint (returned as it is).
        cache_dir: hub cache, the default one if None.

    Raises:
        CheckpointError: not found, of an unsupported format, damaged, or an adapter.
    """
    if isinstance(location, Checkpoint):
        return location
    if isinstance(location, Mapping):
        return MemoryCheckpoint(location)
    text = str(location)
    if not text or "\0" in text:
        raise CheckpointError(f"expected a folder, a weight file or a hub id, found {text!r}")
    path = Path(text).expanduser()
    hub_id = HUB_ID.fullmatch(text) if isinstance(location, str) else None
    if hub_id is None or not hub_id["scheme"]:
        if path.is_dir():
            return _open_folder(path, text)
        if path.exists():
            return _open_file(path, text)
        if hub_id is None or _means_a_path(path):
            raise _not_found(path, text)
    from actmat.checkpoints.hub import open_hub

    return open_hub(hub_id["repo"], hub_id["revision"], cache_dir=cache_dir)


def _open_folder(path: Path, text: str) -> Checkpoint:
    names = [entry.name for entry in path.iterdir()]
    if weight_format(names, text) == "safetensors":
        return open_safetensors(path, text)
    return open_torch_files(path, text)


def _open_file(path: Path, text: str) -> Checkpoint:
    name = path.name
    if name in ADAPTER_WEIGHTS:
        raise CheckpointError(f"{text}: expected a full checkpoint, found the weights of a PEFT adapter")
    if name.endswith((".safetensors", ".safetensors.index.json")):
        return open_safetensors(path, text)
    if name.endswith((*TORCH_SUFFIXES, ".bin.index.json")):
        return open_torch_files(path, text)
    foreign = foreign_format(name)
    found = f"{foreign}, which is not read" if foreign else f"'{name}'"
    raise CheckpointError(
        f"{text}: expected a file ending in .safetensors, {', '.join(TORCH_SUFFIXES)} or .index.json, found {found}. "
        "Fix: load it with its own library and save it as safetensors."
    )


def _means_a_path(path: Path) -> bool:
    """Whether a missing `a/b` is a path that was misspelt and no hub id: its parent is a folder that exists."""
    return path.parent != Path() and path.parent.is_dir()


def _not_found(path: Path, text: str) -> CheckpointError:
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    missing = path.relative_to(parent).parts[0]
    hint = did_you_mean(missing, (p.name for p in parent.iterdir()))
    return CheckpointError(
        f"{text}: expected a folder, a weight file or a hub id (org/name or org/name@revision), found nothing there: "
        f"'{parent}' has no '{missing}'.{hint} Fix: correct the path; to mean the hub, write hf://org/name."
    )
