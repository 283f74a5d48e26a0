"""Adapters in PEFT's folders, whatever their family: opened by what their config says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from actmat import plugins
from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.folder import ADAPTER_CONFIG
from actmat.checkpoints.keys import unknown_note
from actmat.errors import CheckpointError
from actmat.experts.base import Expert, Family
from actmat.experts.changes.base import Content, Reader
from actmat.experts.changes.expert import FormedExpert
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import field_refusals, parse_adapter_config
from actmat.experts.lora.expert import fitted_expert, unfitted_expert
from actmat.experts.lora.fields import StackWord
from actmat.experts.lora.open import is_adapter, open_adapter
from actmat.experts.untied import keeps_ties


def reader_of(fields: Mapping[str, Any]) -> Reader | None:
    """The first plug-in of `actmat.readers` that claims this config; None for plain LoRA, and for what is not read.

    >>> reader_of({"peft_type": "LORA", "use_dora": True}).name
    'DoRA'
    """
    if not parse_adapter_config(fields)[1]:
        return None
    readers: dict[str, Reader] = plugins.load_all("actmat.readers")
    return next((reader for reader in readers.values() if reader.claims(fields)), None)


def _open(location: str | Path, base: Checkpoint, stacks: tuple[StackWord, ...] = ()) -> Expert:
    adapter, family = open_adapter(location, stacks), _told(stacks) if stacks else PEFT
    reader = reader_of(adapter.config.fields)
    try:
        expert: Expert
        if reader is None:
            expert = fitted_expert(adapter, location, base, family)
        else:
            fields = adapter.config.fields
            content = replace(_content(reader, adapter), keeps_ties=keeps_ties(fields))
            expert = FormedExpert(adapter.weights, base, content, family)
            unknown = () if reader.keys is None else reader.keys.sort(fields).unknown
            expert.notes = (*expert.notes, *unknown_note(ADAPTER_CONFIG, unknown))
        expert.notes = (*expert.notes, *_lost_biases(adapter, expert, base))
        return expert
    except CheckpointError:
        adapter.weights.close()
        raise


def _content(reader: Reader, adapter: Adapter) -> Content:
    """The content of an adapter, with a problem for each field of its config that is set and refused."""
    fields = adapter.config.fields
    content = reader.read(adapter.weights.specs, fields)
    refused = () if reader.keys is None else field_refusals(reader.keys, fields)
    return replace(content, problems=tuple(dict.fromkeys((*content.problems, *refused))))


def _lost_biases(adapter: Adapter, expert: Expert, base: Checkpoint) -> Sequence[str]:
    """A note if the adapter trained biases that its file lacks."""
    if adapter.config.bias != "lora_only" or any(name.endswith(".bias") for name in adapter.extras):
        return ()
    biases = [n.removesuffix("weight") + "bias" for n in expert.specs if expert.source(n).kind == "formed"]
    if not (lost := [n for n in biases if n in base.specs]):
        return ()
    return (
        f"bias is 'lora_only', and its file has none of the {len(lost)} biases such as '{lost[0]}': PEFT before 0.21 "
        "did not save them. The base's stay, as PEFT loads it; what was trained of them is lost",
    )


def _open_unfitted(location: str | Path, stacks: tuple[StackWord, ...] = ()) -> Expert:
    adapter, family = open_adapter(location, stacks), _told(stacks) if stacks else PEFT
    reader = reader_of(adapter.config.fields)
    if reader is None:
        return unfitted_expert(adapter, family)
    return unfitted_expert(_without_factors(adapter, reader), family)


def _told(stacks: tuple[StackWord, ...]) -> Family:
    """The family, whose functions know what the user says of stacked experts."""
    opened, unfitted = partial(_open, stacks=stacks), partial(_open_unfitted, stacks=stacks)
    return replace(PEFT, open=opened, open_unfitted=unfitted)


def _without_factors(adapter: Adapter, reader: Reader) -> Adapter:
    """The adapter with one problem: why no adapter can be merged from it."""
    problem = (
        f"an adapter of the family {reader.name} has no factors that an adapter could be merged from: "
        f"{reader.why_no_factors}. Give the base and write a model (--base ..., --to model), or with --to adapter one "
        "that is extracted: exact for VeRA, PiSSA, OLoRA and AdaLoRA, else with --rank or --energy ('actmat extract')"
    )
    return adapter.with_problems((problem,))


def _has_factors(location: str | Path) -> bool:
    try:
        with open_adapter(location) as adapter:
            return reader_of(adapter.config.fields) is None
    except CheckpointError:
        return True  # opening it as an expert will say why


def _described(adapter: Adapter) -> dict[str, Any]:
    """Entries of `inspect` for a family that is no plain LoRA; none for LoRA."""
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
    """Last part of a stored name that is no `weight`."""
    return next(part for part in reversed(name.split(".")) if part != "weight")


PEFT = Family(
    "PEFT",
    is_adapter,
    _open,
    _open_unfitted,
    open_stored=open_adapter,
    has_factors=_has_factors,
    describe=_described,
    told=_told,
)
