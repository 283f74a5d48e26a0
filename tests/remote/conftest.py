"""A web server for the whole module, and retries without pauses."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
from moto.server import ThreadedMotoServer
from tests.helpers.range_server import RangeServer, range_server

from actmat.extras.remote import retry

_NUMBERS = itertools.count()


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


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """A stand-in for S3, started once: importing it takes seconds."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """URL of a new bucket, with credentials in the environment."""
    for name, value in {
        "AWS_ENDPOINT_URL": moto_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    name = f"bucket-{next(_NUMBERS)}"
    s3fs.S3FileSystem(use_listings_cache=False).mkdir(name)
    return f"s3://{name}"
