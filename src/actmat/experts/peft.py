"""Adapters in PEFT's folders, of any family: opened wherever they are, and fitted as their config says.

A folder is an adapter when it holds `adapter_config.json` and no weights of a full model. Only JSON and tensors are
read; neither PEFT nor transformers is needed. LoRA files without a config are read by a plug-in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from actmat import plugins
from actmat.bounds import read_object
from actmat.checkpoints.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, may_be_weights
from actmat.checkpoints.formats.safetensors import SAFETENSORS
from actmat.checkpoints.formats.torch_files import TORCH_FILES, TORCH_SUFFIXES
from actmat.checkpoints.keys import unknown_note
from actmat.checkpoints.model import CONFIG, Model
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError
from actmat.experts.changes.base import Content, Reader
from actmat.experts.changes.deltas import fit_changes
from actmat.experts.deltas import AdapterFamily, Deltas
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import field_refusals, parse_adapter_config
from actmat.experts.lora.deltas import fit_factors
from actmat.experts.lora.fields import StackWord
from actmat.experts.lora.names import canonical

_OF_MODELS = ("model", "pytorch_model", "diffusion_pytorch_model", "consolidated")
"""Start of the names of files with all weights of a model."""


def reader_of(fields: Mapping[str, Any]) -> Reader | None:
    """The first reader that claims this config; None for plain LoRA and for unsupported types.

    >>> reader_of({"peft_type": "LORA", "use_dora": True}).name
    'DoRA'
    """
    if not parse_adapter_config(fields)[1]:
        return None
    readers = plugins.load_all("actmat.experts", Reader, "reader")
    return next((reader for reader in readers.values() if reader.claims(fields)), None)


def _fit(adapter: Adapter, base: Model) -> Deltas:
    fields = adapter.config.fields
    reader = reader_of(fields)
    if reader is None:
        deltas = fit_factors(adapter, base)
    else:
        deltas = fit_changes(adapter, base, _content(reader, adapter))
        unknown = () if reader.keys is None else reader.keys.unknown(fields)
        deltas.note(*unknown_note(ADAPTER_CONFIG, unknown))
    deltas.note(*_lost_biases(adapter, deltas, base))
    return deltas


def _content(reader: Reader, adapter: Adapter) -> Content:
    """The content of an adapter, with a problem for each field of its config that is set and refused."""
    fields = adapter.config.fields
    content = reader.read(adapter.weights.specs, fields)
    refused = () if reader.keys is None else field_refusals(reader.keys, fields)
    changed = [c.target.rpartition(".")[0] for c in content.changes if c.kind != "tokens"]
    ignored = adapter.config.targets.problems(dict.fromkeys(changed))
    return replace(content, problems=tuple(dict.fromkeys((*content.problems, *refused, *ignored))))


def _lost_biases(adapter: Adapter, deltas: Deltas, base: Model) -> Sequence[str]:
    """A note if the adapter trained biases that its file lacks."""
    if adapter.config.bias != "lora_only" or any(name.endswith(".bias") for name in adapter.extras):
        return ()
    biases = [n.removesuffix("weight") + "bias" for n in deltas.specs if deltas.source(n).kind == "formed"]
    if not (lost := [n for n in biases if n in base.specs]):
        return ()
    return (
        f"bias is 'lora_only', and its file has none of the {len(lost)} biases such as '{lost[0]}': PEFT before 0.21 "
        "did not save them. The base's stay, as PEFT loads it; their training is lost",
    )


def _no_factors(adapter: Adapter) -> str:
    """The reason why no adapter can be merged from it; empty for LoRA."""
    reader = reader_of(adapter.config.fields)
    return "" if reader is None else (
        f"an adapter of the family {reader.name} has no factors from which an adapter could be merged: "
        f"{reader.why_no_factors}. Give the base and write a model (--base ..., --to model), or with --to adapter one "
        "that is extracted: exact for VeRA, PiSSA, OLoRA and AdaLoRA, else with --rank ('actmat extract')"
    )  # fmt: skip


def _described(adapter: Adapter) -> dict[str, Any]:
    """Entries of `inspect` for a family that is not plain LoRA; empty for LoRA."""
    specs = adapter.weights.specs
    reader = reader_of(adapter.config.fields)
    if reader is None:
        return {}
    content = _content(reader, adapter)
    return {
        "adapter": reader.name,
        "needs_base": reader.why_no_factors,
        "modules": [
            {"name": c.target, "kind": c.kind, "rank": c.rank, "stored": [_role(n) for n in c.stored]}
            for c in content.changes
        ],
        "full_tensors": {n: list(specs[s].shape) for n, s in content.extras.items()},
        "problems": list(content.problems),
    }


def _role(name: str) -> str:
    """Last part of a stored name that is not `weight`."""
    return next(part for part in reversed(name.split(".")) if part != "weight")


def look_for_peft(source: Source, file: Model | None, stacks: tuple[StackWord, ...]) -> Adapter | None:
    """The PEFT adapter in a source, or None; its config and the headers of its weights are read. See `AdapterFamily`.

    Raises:
        CheckpointError: its files cannot be read. Problems of its contents are in `Adapter.problems`.
    """
    is_adapter = _holds_adapter(source.names) if source.named is None else source.named in ADAPTER_WEIGHTS
    if not is_adapter:
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
        others = [n for n in others if CONFIG in names and n.startswith(_OF_MODELS) and "_fsdp" not in n]
    return ADAPTER_CONFIG in names and not others


PEFT = AdapterFamily("PEFT", look_for_peft, _fit, _no_factors, _described)
