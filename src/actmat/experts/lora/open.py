"""Open an adapter from PEFT's folder or its weight file, wherever they are.

A folder is an adapter when it holds `adapter_config.json` and no weights of a full model. Only JSON and tensors are
read; neither PEFT nor transformers is needed. LoRA files without a config are read by a plug-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from actmat.bounds import read_object
from actmat.checkpoints.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, may_be_weights
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES, TORCH_SUFFIXES
from actmat.checkpoints.model import Model
from actmat.checkpoints.source import LocalSource, Source
from actmat.errors import CheckpointError
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import parse_adapter_config
from actmat.experts.lora.fields import StackWord
from actmat.experts.lora.names import canonical

_OF_MODELS = ("model", "pytorch_model", "diffusion_pytorch_model", "consolidated")
"""Start of the names of files with all weights of a model."""


def look_for_peft(source: Source, file: Model | None, stacks: tuple[StackWord, ...]) -> Adapter | None:
    """The PEFT adapter in a source, or None; its config and the headers of its weights are read. See `AdapterFamily`.

    Raises:
        CheckpointError: its files cannot be read, or a folder of several adapters. Problems of its contents are in
            `Adapter.problems`.
    """
    if source.named is None and not _holds_adapter(source.names):
        if isinstance(source, LocalSource):
            _refuse_several(source)
        return None
    if source.named is not None and source.named not in ADAPTER_WEIGHTS:
        return None
    folder = source.whole()
    name = source.named or next((n for n in ADAPTER_WEIGHTS if n in folder.names), None)
    if name is None:
        raise CheckpointError(f"{source.location}: has {ADAPTER_CONFIG}, but neither {' nor '.join(ADAPTER_WEIGHTS)}")
    parsed, problems = parse_adapter_config(read_object(folder.fetch(ADAPTER_CONFIG)), stacks)
    weights = (TORCH_FILES if name.endswith(".bin") else SAFETENSORS).open(folder.only(name))
    weights = replace(weights, folder=replace(weights.folder, files=(folder,), merged=ADAPTER_WEIGHTS))
    return Adapter(canonical(weights), parsed, problems)


def _holds_adapter(names: Sequence[str]) -> bool:
    full = (".safetensors", ".safetensors.index.json", *TORCH_SUFFIXES)
    others = [n for n in names if n.endswith(full) and may_be_weights(n)]
    if any(n in ADAPTER_WEIGHTS for n in names):  # a value head or a projector may lie beside it
        others = [n for n in others if n.startswith(_OF_MODELS) and "_fsdp" not in n]
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
