"""Trajectory and distribution: against formulae, on a demo, on a transformers model and its texts, on statistics."""

from __future__ import annotations

import json

import pytest
from tests.helpers.analyses import tiny_demo
from tests.helpers.models import save_tiny_llama


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    pytest.importorskip("sklearn")
    return tiny_demo(tmp_path_factory.mktemp("own") / "demo")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own-model")
    save_tiny_llama(folder / "base")
    lines = [json.dumps({"text": " ".join(f"w{(3 * i + j) % 17}" for j in range(12))}) for i in range(12)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return folder
