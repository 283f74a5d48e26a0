"""Door of statistics files: the header in their metadata, and their tensors."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from actmat.checkpoints.hashing import ContentHash
from actmat.errors import MergeError
from actmat.statistics.header import parse_header
from actmat.statistics.store import open_statistics
from fuzz.doors.folder import in_folder
from fuzz.draw import json_text, mutated_bytes
from fuzz.harness import Files, door

TENSORS = {"gram.w": torch.ones(3), "fisher.w": torch.ones(2, 2)}


@cache
def _header() -> dict[str, Any]:
    hashes = {}
    for name, tensor in TENSORS.items():
        content = ContentHash()
        content.update(tensor.numpy().tobytes())
        hashes[name] = content.hexdigest()
    zero = "0" * 32
    return {"format": 1, "model": {"location": "m", "content": zero, "tensors": {"w": zero}}, "data": [], "samples": 1,
            "tokens": 1, "grams": {"w": {"width": 2, "rows": 1, "hash": hashes["gram.w"]}},
            "fisher": {"w": hashes["fisher.w"]}, "fisher_samples": 1, "fisher_labels": "model", "places": {"w": [{"gram": "w"}]}}  # fmt: skip


def _case(rng: random.Random) -> Files:
    text = json_text(rng, _header()).decode("utf-8", "replace")
    content = save(TENSORS, {"actmat_statistics": text})
    return {"statistics.safetensors": mutated_bytes(rng, content) if rng.random() < 0.2 else content,
            "header": text.encode()}  # fmt: skip


def _read(folder: Path) -> str:
    said = ""
    try:
        parse_header({"actmat_statistics": (folder / "header").read_text()}, "x")
    except MergeError as error:
        said = str(error)
    with open_statistics(folder) as statistics:
        for name in statistics.specs:
            kind, _, key = name.partition(".")
            statistics.read(kind, key)
    return said


door("statistics", _case, in_folder(_read))
