"""Places of inputs: folders of this machine, the cache of the hub, the hub itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from actmat.bounds import local_path
from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.errors import CheckpointError

MOST = 500
"""Largest number of entries of a folder that are listed."""

RECIPES = (".yaml", ".yml")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


def folder_of(path: str) -> dict[str, Any]:
    """Sub-folders, weight files and recipes of a folder, each with what it holds.

    That is `merged`, `adapter`, `checkpoint`, `file`, `recipe`, or nothing of these.

    Raises:
        CheckpointError: no folder, or one that cannot be read.
    """
    here = local_path(path or ".").absolute()
    try:
        with os.scandir(here) as scan:
            entries = sorted((e for e in scan if not e.name.startswith(".")), key=lambda e: e.name.lower())
    except OSError as error:
        raise CheckpointError(f"{here}: expected a folder that can be read: {error.strerror}.") from None
    rows = [{"name": e.name, "path": str(here / e.name), "kind": _kind(e)} for e in entries]
    shown = [r for r in rows if r["kind"] is not None]
    return {
        "path": str(here),
        "parent": str(here.parent),
        "kind": _kind_of_folder(here),
        "entries": shown[:MOST],
        "left_out": max(0, len(shown) - MOST),
    }


def _kind(entry: os.DirEntry[str]) -> str | None:
    """The content of an entry of a folder; None for one that is neither a folder nor a weight file."""
    try:
        if entry.is_dir():
            return _kind_of_folder(Path(entry.path))
    except OSError:
        return None
    return "file" if entry.name.endswith(WEIGHTS) else "recipe" if entry.name.endswith(RECIPES) else None


def _kind_of_folder(folder: Path) -> str:
    try:
        names = set(os.listdir(folder))
    except OSError:
        return ""
    if MANIFEST_NAME in names:
        return "merged"
    if "adapter_config.json" in names:
        return "adapter"
    is_model = "config.json" in names and any(n.endswith(WEIGHTS) for n in names)
    return "checkpoint" if is_model or any(n.endswith(".safetensors") for n in names) else ""


def cached_models() -> list[dict[str, Any]]:
    """Models in the hub's cache of this machine: hub id and size, newest first."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = sorted((r for r in repositories if r.repo_type == "model"), key=lambda r: -r.last_modified)
    return [{"path": r.repo_id, "bytes": r.size_on_disk} for r in models[:MOST]]


def found_on_hub(words: str) -> list[dict[str, Any]]:
    """Models on the hub that a search finds, most loaded first.

    Raises:
        CheckpointError: the hub cannot be asked.
    """
    from huggingface_hub import HfApi

    from actmat.checkpoints.hub import explained

    with explained(f"search for {words[:80]!r}"):
        found = HfApi().list_models(search=words, sort="downloads", limit=20)
        return [{"path": m.id, "downloads": m.downloads} for m in found]
