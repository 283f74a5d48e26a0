"""Names of files in a checkpoint folder, its config and shard index, and the check of names before they are opened.

An index comes with a download, so the file names in it are untrusted: only plain names that stay in the folder are
opened.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actmat.bounds import kind_of_file, read_object
from actmat.errors import CheckpointError
from actmat.system import is_file_name

INDEX_SUFFIX = ".index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
LORA_FILES = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")
"""Names that diffusers gives to LoRA files without a config."""
_OF_TRAINING = re.compile(
    r"(?:training_args|(?:optimizer|scheduler|scaler|sampler|rng_state|random_states|dl_state_dict|recipe_state)"
    r"(?:_\d+)*)\.(?:bin|pt|pth)"
)
"""Files that transformers' `Trainer`, accelerate and torchtune save for resuming; several processes number them."""

FOREIGN = {
    "*.ggml": "a GGML file: quantized or laid out for llama.cpp",
    "*.h5": "a TensorFlow checkpoint",
    "*.ckpt.index": "a TensorFlow checkpoint",
    "*.msgpack": "a Flax checkpoint",
    "*.onnx": "an ONNX graph",
    "*.npz": "a NumPy archive",
    "*.tflite": "a TensorFlow Lite graph",
    "*.nemo": "a NeMo archive (NeMo's scripts export it to the Hugging Face format)",
    "common.pt": "a Megatron-core file (its converters write the Hugging Face format)",
    "*_states.pt": "DeepSpeed states (convert them: python zero_to_fp32.py . OUT --safe_serialization)",
    "shard-?????-model-*.safetensors": "one rank's part of a checkpoint (torch's consolidate_safetensors_files joins "
    "them)",
}
"""Pattern of the names of weight files in formats that are not read -> description."""


def read_config(directory: Path | None) -> Mapping[str, Any] | None:
    """Parsed `config.json` of a folder, or None without the folder or the file."""
    if directory is None or not os.path.lexists(directory / "config.json"):
        return None
    config = read_object(path := member(directory, "config.json"))
    named = config.get("architectures") or ()
    if not isinstance(named, str | list | tuple):
        raise CheckpointError(
            f"{path}: expected a list of class names as 'architectures', found {shown(named)}. Likely cause: a file of "
            "another program. Fix: fetch it again."
        )
    return {**config, "architectures": [named]} if isinstance(named, str) else config


def read_index(path: Path) -> dict[str, str]:
    """`weight_map` (tensor name -> plain file name) of a `*.index.json`.

    Raises:
        CheckpointError: not an index, or it names files outside of its folder.
    """
    weight_map = read_object(path, unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: expected a weight_map of tensor names to file names, found none. "
            "Fix: save the checkpoint again, or remove the index when the folder holds one weight file."
        )
    files = {str(file): file for file in weight_map.values()}  # few; judged once each
    bad = {text[:200] for text, file in files.items() if not is_plain_name(file)}
    if bad:
        raise CheckpointError(
            f"{path}: the weight_map names files outside its folder; do not trust this download",
            [f"{path.name}: {file!r} is not a plain file name" for file in sorted(bad)],
        )
    return weight_map


def member(folder: Path, name: str) -> Path:
    """Path of a file of the folder, or below it, its name with slashes.

    A link may lead out of it only to the blobs of the hub cache it lies in; folders on the way are no links.

    Raises:
        CheckpointError: not a plain path, missing, not a regular file, a link out of the folder, or on the way.
    """
    if not is_plain_path(name):
        raise CheckpointError(f"{folder}: {name[:200]!r} is not a path below the folder")
    path = folder / name
    for above in path.relative_to(folder).parents[:-1]:
        if os.path.islink(folder / above):
            raise CheckpointError(f"{folder / above}: expected a folder, found a link. Fix: give the real folder.")
    try:
        mode = path.stat().st_mode
        target, home = path.resolve(), folder.resolve()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{path}: the file is missing. Likely cause: an incomplete download. Fix: fetch the folder again."
        ) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: expected a file, found {kind_of_file(mode)}")
    if not any(target.is_relative_to(parent) for parent in (home, *_hub_blobs(home))):
        raise CheckpointError(
            f"{path}: is a link to {target}, outside its folder. Likely cause: a hostile archive, or links made by "
            "hand. Fix: copy the file into the folder, or give the folder that holds the real files."
        )
    return path


def shown(value: Any) -> str:
    """`repr` of a value, cut: a hostile name must not flood the terminal."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def is_plain_name(name: object) -> bool:
    """True for the name of a file in a folder: no path, no control characters.

    >>> is_plain_name("model.safetensors"), is_plain_name("../secret")
    (True, False)
    """
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(c in name for c in "/\\\0")
        and name.isprintable()
        and len(name) <= 255
        and is_file_name(name)
    )


def is_plain_path(name: object) -> bool:
    """True for a path below a folder, with slashes.

    >>> is_plain_path("vae/config.json"), is_plain_path("/etc/passwd"), is_plain_path("a/../b")
    (True, False, False)
    """
    return isinstance(name, str) and all(map(is_plain_name, name.split("/")))


def _hub_blobs(folder: Path) -> tuple[Path, ...]:
    """Blob stores of `<cache>/models--org--name/snapshots/<rev>`: that of the repository and that of the cache."""
    if folder.parent.name != "snapshots" or not folder.parents[1].name.startswith("models--"):
        return ()
    return folder.parents[1] / "blobs", folder.parents[2] / "blobs"


def may_be_weights(name: str) -> bool:
    """False for files of adapters and of training, which have the suffixes of weights.

    >>> may_be_weights("model.bin"), may_be_weights("rng_state_0.pth"), may_be_weights("adapter_model.bin")
    (True, False, False)
    """
    return name not in ADAPTER_WEIGHTS and not _OF_TRAINING.fullmatch(name)


def foreign_format(name: str) -> str:
    """Description of a file in a format that is not read, by its name; empty for any other file."""
    return next((text for pattern, text in FOREIGN.items() if fnmatch.fnmatchcase(name, pattern)), "")
