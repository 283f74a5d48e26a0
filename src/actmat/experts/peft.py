"""Adapters in PEFT's folders, whatever their family: opened by what their config says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actmat.checkpoints.base import Checkpoint
from actmat.errors import CheckpointError
from actmat.experts.base import Expert, Family
from actmat.experts.changes.base import Reader
from actmat.experts.changes.expert import FormedExpert
from actmat.experts.changes.lora_variants import DORA, LORA_TOKENS, RESIDUAL, TOKENS
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.expert import fitted_expert, unfitted_expert
from actmat.experts.lora.file_names import holds_factors
from actmat.experts.lora.lora_files import open_lora_file
from actmat.experts.lora.open import is_adapter, open_adapter
from actmat.extras.adapters.adalora import ADALORA
from actmat.extras.adapters.ia3 import IA3
from actmat.extras.adapters.loha import LOHA
from actmat.extras.adapters.lokr import LOKR
from actmat.extras.adapters.oft import OFT
from actmat.extras.adapters.vera import VERA

__all__ = ["LORA_FILE", "PEFT", "READERS", "reader_of"]

READERS: tuple[Reader, ...] = (DORA, RESIDUAL, LORA_TOKENS, TOKENS, LOHA, LOKR, IA3, VERA, OFT, ADALORA)
"""Families that are no plain LoRA; the first that claims a config reads the adapter."""


def reader_of(fields: Mapping[str, Any]) -> Reader | None:
    """The reader of an adapter with this config; None for plain LoRA, and for what is not read.

    >>> reader_of({"peft_type": "LORA", "use_dora": True}).name
    'DoRA'
    """
    return next((reader for reader in READERS if reader.claims(fields)), None)


def _open(location: str | Path, base: Checkpoint) -> Expert:
    adapter = open_adapter(location)
    reader = reader_of(adapter.config.fields)
    try:
        if reader is None:
            return fitted_expert(adapter, location, base, PEFT)
        content = reader.read(adapter.weights.specs, adapter.config.fields)
        return FormedExpert(adapter.weights, base, content, PEFT)
    except CheckpointError:
        adapter.weights.close()
        raise


def _open_unfitted(location: str | Path) -> Expert:
    adapter = open_adapter(location)
    reader = reader_of(adapter.config.fields)
    if reader is None:
        return unfitted_expert(adapter, PEFT)
    return unfitted_expert(_without_factors(adapter, reader), PEFT)


def _without_factors(adapter: Adapter, reader: Reader) -> Adapter:
    """The adapter with one problem: why no adapter can be merged from it."""
    problem = (
        f"an adapter of the family {reader.name} has no factors that an adapter could be merged from: "
        f"{reader.why_no_factors}. Give the base and write a model (--base ..., --to model), or with --to adapter one "
        "that is extracted: exact for VeRA, PiSSA, OLoRA and AdaLoRA, else with --rank or --energy ('actmat extract')"
    )
    return adapter.with_problems((problem,))


def _open_file(location: str | Path, base: Checkpoint) -> Expert:
    adapter = open_lora_file(location)
    try:
        return fitted_expert(adapter, location, base, LORA_FILE)
    except CheckpointError:
        adapter.weights.close()
        raise


def _open_unfitted_file(location: str | Path) -> Expert:
    return unfitted_expert(open_lora_file(location), LORA_FILE)


PEFT = Family("PEFT", is_adapter, _open, _open_unfitted)
LORA_FILE = Family("LoRA file", None, _open_file, _open_unfitted_file, holds=holds_factors)
