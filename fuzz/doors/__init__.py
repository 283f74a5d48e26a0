"""Doors: importing this package registers all of them."""

from __future__ import annotations

from fuzz.doors import (
    adapters,
    checkpoints,
    codes,
    distributed,
    foreign_recipes,
    journals,
    lora_files,
    lycoris,
    outputs,
    pages,
    paths,
    recipes,
    slow_servers,
    statistics,
    vocabularies,
    web_servers,
)

__all__ = [
    "adapters",
    "checkpoints",
    "codes",
    "distributed",
    "foreign_recipes",
    "journals",
    "lora_files",
    "lycoris",
    "outputs",
    "pages",
    "paths",
    "recipes",
    "slow_servers",
    "statistics",
    "vocabularies",
    "web_servers",
]
