"""Open an adapter from PEFT's folder or its weight file, wherever they are, or from a list of factor pairs.

A folder is an adapter when it holds `adapter_config.json` and no weights of a full model. Only JSON and tensors are
read; neither PEFT nor transformers is needed. LoRA files without a config are read by a plug-in.

The first LoRA trainer for Stable Diffusion (cloneofsimo/lora) wrote a plain list `[up_0, down_0, up_1, down_1, ...]`
in the order of the modules, without names or alpha. Such a `.pt` file is read as an adapter whose modules are called
`pairs.0000`, `pairs.0001`, ...; its scaling is 1. Lists of one model line up with one another by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from actmat.bounds import read_object
from actmat.checkpoints.base import FileIdentity
from actmat.checkpoints.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, may_be_weights
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES, TORCH_SUFFIXES, load_torch
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.source import LocalSource
from actmat.errors import CheckpointError
from actmat.experts.candidate import Candidate
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import AdapterConfig, parse_adapter_config
from actmat.experts.lora.modules import list_modules
from actmat.experts.lora.names import canonical
from actmat.experts.lora.patterns import PatternTable

_OF_MODELS = ("model", "pytorch_model", "diffusion_pytorch_model", "consolidated")
"""Start of the names of files with all weights of a model."""
PAIR_LIST = "pairs"
"""First component of the module names in an adapter from a list of pairs."""


def look_for_peft(candidate: Candidate) -> Adapter | None:
    """The PEFT adapter or list of pairs at a place, or None; its config and the headers of its weights are read.

    Raises:
        CheckpointError: its files cannot be read, or a folder of several adapters. Problems of its contents are in
            `Adapter.problems`.
    """
    source = candidate.source
    if source.named is None and not _holds_adapter(source.names):
        if isinstance(source, LocalSource):
            _refuse_several(source)
        return None
    if source.named is not None and source.named not in ADAPTER_WEIGHTS:
        is_candidate = isinstance(source, LocalSource) and source.named.endswith(".pt")
        pairs = pair_list(source.fetch(source.named)) if is_candidate else None
        return None if pairs is None else _of_pairs(pairs, source.location, source.identity([source.named]))
    folder = source.whole()
    name = source.named or next((n for n in ADAPTER_WEIGHTS if n in folder.names), None)
    if name is None:
        raise CheckpointError(f"{source.location}: has {ADAPTER_CONFIG}, but neither {' nor '.join(ADAPTER_WEIGHTS)}")
    parsed, problems = parse_adapter_config(read_object(folder.fetch(ADAPTER_CONFIG)), candidate.stacks)
    weights = (TORCH_FILES if name.endswith(".bin") else SAFETENSORS).open(folder.only(name))
    return Adapter(canonical(weights), parsed, problems)


def _holds_adapter(names: Sequence[str]) -> bool:
    full = (".safetensors", ".safetensors.index.json", *TORCH_SUFFIXES)
    others = [n for n in names if n.endswith(full) and may_be_weights(n)]
    if any(n in ADAPTER_WEIGHTS for n in names):  # a value head or a projector may lie beside it
        others = [n for n in others if n.startswith(_OF_MODELS)]
    return ADAPTER_CONFIG in names and not others


def _refuse_several(folder: LocalSource) -> None:
    """Refuse a folder of adapters, as PEFT saves several of one model.

    Raises:
        CheckpointError: names them.
    """
    if any(n.endswith((".safetensors", *TORCH_SUFFIXES)) or n == "config.json" for n in folder.names):
        return
    path = Path(folder.address)
    children = sorted(n for n in folder.names if (path / n / ADAPTER_CONFIG).is_file())
    if children:
        raise CheckpointError(
            f"{folder.location}: expected one adapter, found a folder of {len(children)}: {', '.join(children)}. Fix: "
            f"give those that you want, such as {folder.location.rstrip('/')}/{children[0]}"
        )


def pair_list(path: Path) -> list[Tensor] | None:
    """The tensors of a `.pt` file that is a plain list of tensors, else None."""
    try:
        value = load_torch(path, path.name, str(path))
    except CheckpointError:
        return None  # not a list of tensors; opening it as a checkpoint gives the error
    listed = isinstance(value, list) and len(value) > 0 and all(isinstance(x, Tensor) for x in value)
    return value if listed else None


def _of_pairs(pairs: list[Tensor], location: str, files: tuple[FileIdentity, ...]) -> Adapter:
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
    weights = MemoryCheckpoint(tensors, location=location, files=files)
    return Adapter(weights, config, problems, replace(list_modules(weights.specs, config), layout="pairs"))
