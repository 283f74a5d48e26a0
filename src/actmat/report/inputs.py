"""Inputs of a merge as its manifest records them: hashes and present locations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["expert_hashes", "input_location"]


def expert_hashes(manifest: Mapping[str, Any], name: str) -> dict[str, str]:
    """Stored name -> hash of every tensor that was read from an expert; of an adapter, of all that it stores."""
    names = [e["name"] for e in manifest["experts"]]
    t = names.index(name)
    if "hashes" in manifest["experts"][t]:
        return dict(manifest["experts"][t]["hashes"])
    rows = (r for r in manifest["tensors"] if "sources" in r and name in r["input_hashes"])
    return {r["sources"][t]: r["input_hashes"][name] for r in rows}


def input_location(entry: Mapping[str, Any], out: Path) -> str:
    """Present location of an input: relative to the output if it is there, else as it was given."""
    near = out / entry["from_here"] if "from_here" in entry else None
    return os.path.normpath(near) if near is not None and near.exists() else str(entry["location"])
