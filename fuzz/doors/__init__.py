"""Doors: importing this package registers all of them."""

from __future__ import annotations

from fuzz.doors import adapters, checkpoints, distributed, journals, lora_files, outputs, paths, recipes, statistics

__all__ = [
    "adapters",
    "checkpoints",
    "distributed",
    "journals",
    "lora_files",
    "outputs",
    "paths",
    "recipes",
    "statistics",
]
