"""Tiny Llamas whose experts are far enough from their base to answer otherwise, and texts for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.docs_fixture import write_models

TEXTS = {
    "math": ["one two", "three four five six", "seven", "eight nine", "two and two", "ten"],
    "code": ["def f(x): return x", "for i in x", "x = 1", "while x", "import y", "f(x)"],
}


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("family")
    write_models(folder)
    for seed, name in enumerate(TEXTS):
        file = folder / "experts" / name / "model.safetensors"
        rng = torch.Generator().manual_seed(seed)
        tensors = {k: (t + torch.randn(t.shape, generator=rng) * 0.2).to(t.dtype) for k, t in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS[name]))
    return folder
