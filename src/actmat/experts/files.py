"""Single files that may hold an adapter, without a config: found, opened, and recognised by the names of their tensors.

Such a file is a `.safetensors` file, one in a folder that has no other and no `config.json`, a file of diffusers' name
`pytorch_lora_weights`, and, elsewhere than on this machine, the only file where its name says `lora`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from actmat.bounds import is_url, list_folder, local_path
from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.folder import ADAPTER_CONFIG, LORA_FILES, member
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES
from actmat.checkpoints.resolve import HUB_ID, find_source
from actmat.checkpoints.source import LocalSource, Source
from actmat.errors import CheckpointError

_MODEL_FILES = ("config.json", "model_index.json", ADAPTER_CONFIG)
_FACTOR = re.compile(
    r".\.(?:lora_(?:down|up|[AB]|[AB]\.default)\.weight|(?:to_\w+_lora|lora|lora_linear_layer)\.(?:down|up)\.weight"
    r"|(?:hada|lokr|oft|boft|ia3|glora|bora)_[^.]*(?:\.\w+)?"
    r"|(?:dora_scale|lora_magnitude_vector|lora_mid|on_input)[^.]*(?:\.\w+)?)$"
)
"""Names of factors of LoRA and of the families in its place, in every layout."""


def holds_factors(names: Iterable[str]) -> bool:
    """True if a tensor is a factor of an adapter; a scale by itself is none.

    >>> holds_factors(["a.lora_up.weight"]), holds_factors(["a.weight", "block.alpha"])
    (True, False)
    """
    return any(map(_FACTOR.search, names))


def tensor_names(location: str | Path) -> frozenset[str]:
    """Names in a file that may be one of factors, from its header; none where no such file is."""
    try:
        opened = open_weights(location)
    except CheckpointError:
        return frozenset()  # opening it as a checkpoint gives the error
    if opened is None:
        return frozenset()
    with opened:
        return frozenset(opened.specs)


def unmerged_problem(checkpoint: Checkpoint) -> str:
    """One sentence on a checkpoint that holds factors of adapters, no weights of a model; empty for others."""
    if not holds_factors(checkpoint.specs):
        return ""
    first = next(n for n in checkpoint.specs if holds_factors([n]))
    return (
        f"{checkpoint.location}: expected a full checkpoint, found factors of an adapter, such as '{first}', which are "
        "no weights of a model. Fix: a LoRA file by itself is read from a .safetensors file (safetensors.torch."
        "save_file); merge one that is part of a model into it first (merge_and_unload, fuse_lora)"
    )


def open_weights(location: str | Path) -> Checkpoint | None:
    """The file that may be one of factors, opened; None where there is none."""
    if is_url(location) and not str(location).startswith("hf://"):
        return _open_elsewhere(str(location))
    path = local_path(location)
    if os.path.isdir(path):
        names = list_folder(path)
        name = next((n for n in LORA_FILES if n in names), None)
        if name is None and not any(n in names for n in _MODEL_FILES):
            found = [n for n in names if n.endswith(".safetensors")]
            name = found[0] if len(found) == 1 else None
        return None if name is None else _open_source(LocalSource(member(path, name), str(location)))
    if os.path.isfile(path):
        is_candidate = path.suffix == ".safetensors" or path.name in LORA_FILES
        return _open_source(LocalSource(path, str(location))) if is_candidate else None
    hub_id = HUB_ID.fullmatch(str(location))
    if hub_id is None or (path.parent != Path() and os.path.isdir(path.parent)):
        return None
    return _open_hub(hub_id["repo"], hub_id["revision"])


def _open_source(source: Source) -> Checkpoint:
    assert source.named is not None, "one file"
    return (SAFETENSORS if source.named.endswith(".safetensors") else TORCH_FILES).open(source)


def _open_elsewhere(url: str) -> Checkpoint | None:
    source = find_source(url)
    name = _named_lora([source.named] if source.named else source.names)
    return None if name is None else SAFETENSORS.open(source.downloading(name))


def _open_hub(repo: str, revision: str | None) -> Checkpoint | None:
    from actmat.checkpoints.hub import open_repository

    repository = open_repository(repo, revision)
    name = _named_lora([n for n in repository.files if "/" not in n])
    return None if name is None else _open_source(repository.downloading(name))


def _named_lora(names: Sequence[str]) -> str | None:
    """The file that by the names of all files holds factors."""
    if any(n in names for n in _MODEL_FILES):
        return None
    found = [n for n in names if n.endswith(".safetensors")]
    if LORA_FILES[0] in found:
        return LORA_FILES[0]
    return found[0] if len(found) == 1 and "lora" in found[0].lower() else None
