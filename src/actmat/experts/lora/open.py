"""Open an adapter from a folder, its weight file, a hub id, a URL, a LoRA file, or a list of factor pairs.

A folder is an adapter when it holds `adapter_config.json` and no weights of a full model. Only JSON and tensors are
read; neither PEFT nor transformers is needed. LoRA files without a config are a plug-in's.

The first LoRA trainer for Stable Diffusion (cloneofsimo/lora) wrote a plain list `[up_0, down_0, up_1, down_1, ...]`
in the order of the modules, without names or alpha. Such a `.pt` file is read as an adapter whose modules are called
`pairs.0000`, `pairs.0001`, ...; its scaling is 1. Lists of one model line up with one another by position.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from actmat.bounds import is_url, list_folder, local_path, read_object
from actmat.checkpoints.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, NOT_WEIGHTS, member
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES, TORCH_SUFFIXES, load_torch
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.resolve import HUB_ID, find_source
from actmat.checkpoints.source import LocalSource, Source
from actmat.errors import CheckpointError
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import AdapterConfig, parse_adapter_config
from actmat.experts.lora.fields import StackWord
from actmat.experts.lora.modules import list_modules
from actmat.experts.lora.patterns import PatternTable

PAIR_LIST = "pairs"
"""First component of the module names in an adapter from a list of pairs."""


def is_adapter(location: str | Path) -> bool:
    """True where an adapter is, and no full checkpoint; reads no tensor of a full checkpoint.

    Raises:
        CheckpointError: a folder of several adapters; names them.
    """
    if is_url(location) and not str(location).startswith("hf://"):
        source = find_source(str(location))
        return source.named in ADAPTER_WEIGHTS or _holds_adapter(list(source.names))
    path = local_path(location)
    if os.path.isdir(path):
        names = list_folder(path)
        return _holds_adapter(names) or _refuse_several(path, names)
    if os.path.isfile(path):
        return path.name in ADAPTER_WEIGHTS or (path.suffix == ".pt" and pair_list(path) is not None)
    hub_id = HUB_ID.fullmatch(str(location))
    if hub_id is None or (path.parent != Path() and os.path.isdir(path.parent)):
        return False
    from actmat.checkpoints.hub import open_repository

    repository = open_repository(hub_id["repo"], hub_id["revision"])
    return _holds_adapter([n for n in repository.files if "/" not in n])


def open_adapter(location: str | Path, stacks: tuple[StackWord, ...] = ()) -> Adapter:
    """Open an adapter; reads the config and the headers of its weights.

    `stacks` is what the user says of its stacked experts.

    Raises:
        CheckpointError: no adapter there, or its files cannot be read. Problems of its contents are in
            `Adapter.problems`.
    """
    if is_url(location) and not str(location).startswith("hf://"):
        return _open_remote(str(location), stacks)
    path = local_path(location)
    if os.path.isfile(path) and path.name not in ADAPTER_WEIGHTS:
        pairs = pair_list(path)
        if pairs is None:
            raise CheckpointError(f"{location}: expected a list of (up, down) factor pairs, found something else")
        return _of_pairs(pairs, str(location))
    if os.path.exists(path):
        folder = path if path.is_dir() else path.parent
        config = member(folder, ADAPTER_CONFIG)
        names = [n for n in ADAPTER_WEIGHTS if (folder / n).is_file()] if path.is_dir() else [path.name]
        sources: dict[str, Source] = {n: LocalSource(member(folder, n), str(location)) for n in names[:1]}
    else:
        location, config, sources = _on_hub(str(location))
    if not sources:
        raise CheckpointError(f"{location}: has {ADAPTER_CONFIG}, but neither {' nor '.join(ADAPTER_WEIGHTS)}")
    parsed, problems = parse_adapter_config(read_object(config), stacks)
    (name, source), *_ = sources.items()
    weights = (TORCH_FILES if name.endswith(".bin") else SAFETENSORS).open(source)
    return Adapter(weights, parsed, problems)


def _open_remote(url: str, stacks: tuple[StackWord, ...]) -> Adapter:
    """An adapter at a URL; its weights are downloaded when a tensor is first read, because they are read often."""
    source = find_source(url).whole()
    name = next((n for n in ADAPTER_WEIGHTS if n in source.names), None)
    if name is None or ADAPTER_CONFIG not in source.names:
        raise CheckpointError(f"{url}: expected {ADAPTER_CONFIG} and {' or '.join(ADAPTER_WEIGHTS)} there")
    parsed, problems = parse_adapter_config(read_object(source.fetch(ADAPTER_CONFIG)), stacks)
    if name.endswith(".bin"):
        source.fetch(name)  # refuses it
    return Adapter(SAFETENSORS.open(source.downloading(name)), parsed, problems)


def _refuse_several(path: Path, names: list[str]) -> bool:
    """False, but an error for a folder of adapters, as PEFT saves several of one model.

    Raises:
        CheckpointError: names them.
    """
    if any(n.endswith((".safetensors", *TORCH_SUFFIXES)) or n == "config.json" for n in names):
        return False
    children = sorted(n for n in names if (path / n / ADAPTER_CONFIG).is_file())
    if children:
        raise CheckpointError(
            f"{path}: expected one adapter, found a folder of {len(children)}: {', '.join(children)}. Fix: give those "
            f"that you want, such as {path / children[0]}"
        )
    return False


def _holds_adapter(names: list[str]) -> bool:
    full = (".safetensors", ".safetensors.index.json", *TORCH_SUFFIXES)
    return ADAPTER_CONFIG in names and not any(n.endswith(full) for n in names if n not in NOT_WEIGHTS)


def _on_hub(location: str) -> tuple[str, Path, dict[str, Source]]:
    """Hub id with the commit, config in the cache, and the weights, of which a plan reads the header only."""
    from actmat.checkpoints.hub import open_repository

    hub_id = HUB_ID.fullmatch(location)
    if hub_id is None:
        raise CheckpointError(f"{location}: expected the folder or hub id of an adapter, found nothing there")
    repository = open_repository(hub_id["repo"], hub_id["revision"])
    names = [n for n in ADAPTER_WEIGHTS if n in repository.files][:1]
    pinned = f"{repository.repo_id}@{repository.commit}"
    return pinned, repository.fetch(ADAPTER_CONFIG), {n: repository.downloading(n) for n in names}


def pair_list(path: Path) -> list[Tensor] | None:
    """The tensors of a `.pt` file that is a plain list of tensors, else None."""
    try:
        value = load_torch(path, path.name, str(path))
    except CheckpointError:
        return None  # not a list of tensors; opening it as a checkpoint gives the error
    listed = isinstance(value, list) and len(value) > 0 and all(isinstance(x, Tensor) for x in value)
    return value if listed else None


def _of_pairs(pairs: list[Tensor], location: str) -> Adapter:
    problems = []
    if len(pairs) % 2:
        problems.append(f"expected (up, down) pairs, found {len(pairs)} tensors: half of a pair is missing")
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for i in range(len(pairs) // 2):
        module = f"{PAIR_LIST}.{i:04d}"
        tensors[f"{module}.lora_B.weight"] = pairs[2 * i]
        tensors[f"{module}.lora_A.weight"] = pairs[2 * i + 1]
        ranks[module] = int(pairs[2 * i + 1].shape[0]) if pairs[2 * i + 1].ndim else 1
    first = next(iter(ranks.values()), 1)
    others = {m.replace(".", r"\."): r for m, r in ranks.items() if r != first}
    table = PatternTable(others)
    config = AdapterConfig(r=first, alpha=float(first), rank_pattern=table, alpha_pattern=table)
    weights = MemoryCheckpoint(tensors, location=location)
    return Adapter(weights, config, problems, replace(list_modules(weights.specs, config), layout="pairs"))
