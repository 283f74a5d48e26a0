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
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.quantisation import quantisation_problems
from actmat.checkpoints.safetensors import open_safetensors
from actmat.checkpoints.torch_files import BIN_INDEX_NAME, TORCH_SUFFIXES, open_torch_files
from actmat.errors import CheckpointError, did_you_mean

__all__ = ["HUB_ID", "open_checkpoint", "quantisation_problems"]

HUB_ID = re.compile(r"(?P<scheme>hf://)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")

FOREIGN = {
    ".gguf": "a GGUF file: quantised or laid out for llama.cpp",
    ".ggml": "a GGML file: quantised or laid out for llama.cpp",
    ".h5": "a TensorFlow checkpoint",
    ".msgpack": "a Flax checkpoint",
    ".ckpt.index": "a TensorFlow checkpoint",
    ".onnx": "an ONNX graph",
    ".npz": "a NumPy archive",
    ".tflite": "a TensorFlow Lite graph",
}
"""Endings of weight files of other formats -> what they are."""

CONVERT = "Fix: load it with its own library and save it as safetensors (save_pretrained)."


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
    if path.is_dir():
        return _open_folder(path, text)
    if path.exists():
        return _open_file(path, text)
    raise _not_found(path, text)


def _open_folder(path: Path, text: str) -> Checkpoint:
    names = sorted(entry.name for entry in path.iterdir())
    has_safetensors = any(n.endswith(".safetensors") and n != "adapter_model.safetensors" for n in names)
    if "adapter_config.json" in names and not (has_safetensors or "config.json" in names):
        raise CheckpointError(
            f"{text}: expected a full checkpoint, found a PEFT adapter (adapter_config.json). Fix: give it where an "
            "adapter is accepted, or fold it into its base first (PeftModel.merge_and_unload, save_pretrained)."
        )
    if has_safetensors or "model.safetensors.index.json" in names:
        return open_safetensors(path, text)
    if BIN_INDEX_NAME in names or any(n.endswith(TORCH_SUFFIXES) for n in names):
        return open_torch_files(path, text)
    foreign = [f"{n} is {_foreign(n)}" for n in names if _foreign(n)]
    if foreign:
        raise CheckpointError(f"{text}: no weights in a supported format: {'; '.join(foreign[:3])}. {CONVERT}")
    inside = [n for n in names if (path / n).is_dir() and any((path / n).glob("*.safetensors"))]
    hint = f" Did you mean '{path / inside[0]}'?" if inside else ""
    raise CheckpointError(
        f"{text}: expected weights (*.safetensors, pytorch_model.bin, *.pt, *.pth), found "
        f"{', '.join(names[:6]) or 'an empty folder'}{', ...' if len(names) > 6 else ''}.{hint} "
        "Likely cause: the wrong folder, or a download of the config alone."
    )


def _open_file(path: Path, text: str) -> Checkpoint:
    name = path.name
    if name == "adapter_model.safetensors":
        raise CheckpointError(f"{text}: expected a full checkpoint, found the weights of a PEFT adapter")
    if name.endswith((".safetensors", ".safetensors.index.json")):
        return open_safetensors(path, text)
    if name.endswith((*TORCH_SUFFIXES, ".bin.index.json")):
        return open_torch_files(path, text)
    foreign = _foreign(name)
    if foreign:
        raise CheckpointError(f"{text}: is {foreign}, which cannot be merged. {CONVERT}")
    raise CheckpointError(
        f"{text}: expected a .safetensors, {', '.join(TORCH_SUFFIXES)} or .index.json file, found '{name}'"
    )


def _foreign(name: str) -> str:
    return next((what for suffix, what in FOREIGN.items() if name.endswith(suffix)), "")


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
