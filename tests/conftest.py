"""Settings of every test, and fixtures that many share."""

import gc
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.helpers.docs_fixture import write_models
from tests.helpers.hub import HubStandIn, hub_stand_in
from tests.helpers.merging import Family

from actmat.identity import reader

settings.register_profile("no deadline", deadline=None)  # a busy machine stalls at times
settings.load_profile("no deadline")
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # its handlers crash in forks of a process that has used Ray (`forks`)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep libraries and tests, millions of objects that stay, out of garbage collections, and have few of these."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # both save 12 % of the processor time of merges, 2026-11-27
        gc.enable()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with two fine-tuned checkpoints and two adapters, see `write_models`; tests only read them."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture
def configs_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs are read by their classes in this process: one of its own for each, as users have it, takes seconds."""

    def ask(texts: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
        return [json.loads(json.dumps(reader.answer(json.loads(text)), default=str)) for text in texts], ""

    monkeypatch.setattr("actmat.identity.reading._ask", ask)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def family(tmp_path: Path) -> Family:
    """A base of one layer and two experts, with the flags of their merge into `tmp_path / "out"`."""
    return Family.make(tmp_path, layers=1)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    """An empty stand-in of the hub, with its cache in `tmp_path / "cache"`."""
    monkeypatch.chdir(tmp_path)
    with hub_stand_in(monkeypatch, tmp_path / "cache") as stand_in:
        yield stand_in
