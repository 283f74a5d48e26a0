"""A web server for the whole module, and retries without pauses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.range_server import RangeServer, range_server

from actmat.checkpoints.remote import retry


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RangeServer]:
    with range_server(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture
def server(served: RangeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RangeServer:
    """The server, with nothing wrong and nothing counted; its root is this test's folder."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    served.reset()
    served.root = tmp_path
    return served
