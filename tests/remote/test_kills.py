"""Merges with inputs or outputs at URLs that are killed, and the same command again: the bytes of one left alone."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
from tests.helpers.merge_server import EVERYTHING, Run, Server
from tests.helpers.merging import Family, actmat, contents, hidden
from tests.helpers.range_server import RangeServer

from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.extras.remote.upload import MARK_NAME


@pytest.fixture(scope="module")
def children(moto_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts processes that can be killed, which know the stand-in for S3 and have a cache of their own."""
    folder = tmp_path_factory.mktemp("children")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", moto_endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        running = Server(folder, [*EVERYTHING, "s3fs", "tests.helpers.small_blocks"])
        yield running
        running.close()


@pytest.mark.parametrize("number", [0, pytest.param(8, marks=pytest.mark.slow), 16])
def test_a_merge_of_remote_inputs_is_killed_amid_a_request(
    children: Server, server: RangeServer, tmp_path: Path, number: int
) -> None:
    """The server kills its client in place of an answer: while it opens the inputs, and while it merges."""
    family = Family.make(tmp_path, layers=6)
    url = [f"{server.url}/{p.name}" for p in (family.base, *family.experts)]
    argv = ["merge", "--base", url[0], *(x for e in url[1:] for x in ("--expert", e)), "--threads", "1", "--out"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert actmat([*argv, str(tmp_path / "a" / "out")]).code == 0
    server.counts.clear()
    started, run = threading.Event(), list[Run]()

    def kill(path: str, request: int, start: int) -> str:
        if (path, request) != ("expert1/model.safetensors", number):
            return ""
        assert started.wait(10)
        run[0].signal(signal.SIGKILL)
        return "close"

    server.fault = kill
    out = tmp_path / "b" / "out"
    run.append(children.start([*argv, str(out)]))
    started.set()
    assert run[0].wait()[0] == -signal.SIGKILL
    assert not out.exists()
    server.fault = lambda path, request, start: ""
    status, errors = children.start([*argv, str(out)]).wait()
    assert status == 0, errors
    done = re.search(r"interrupted merge: (\d+) tensors are done", errors)
    assert (done is not None) == (number > 0), errors
    assert contents(out) == contents(tmp_path / "a" / "out")
    assert hidden(out.parent) in ([], [".out.actmat-lock"])


def listed(url: str) -> set[str]:
    """Names in a folder of a bucket."""
    return {p.rpartition("/")[2] for p in s3fs.S3FileSystem(use_listings_cache=False).find(url)}


@pytest.mark.slow
@pytest.mark.parametrize("sent", [0, 2])
def test_an_upload_is_killed_after_some_shards(children: Server, bucket: str, tmp_path: Path, sent: int) -> None:
    """Nothing that a loader takes for a model lies there; the second run sends what is missing."""
    family = Family.make(tmp_path, layers=2)
    argv = family.argv("--set", "max_shard_size=1500", "--threads", "1", "--out")
    assert actmat([*argv, f"{bucket}/a/out"]).code == 0
    out = f"{bucket}/b/out"
    run = children.start([*argv, out])
    while MARK_NAME not in (there := listed(out)) or sum(n.endswith(".safetensors") for n in there) < sent:
        assert time.monotonic() - run.began < 30, "the upload does not get on"
        assert os.path.exists(f"/proc/{run.pid}")
    run.signal(signal.SIGKILL)
    assert run.wait()[0] == -signal.SIGKILL
    assert not listed(out) & {MANIFEST_NAME, "model.safetensors.index.json"}
    store = s3fs.S3FileSystem(use_listings_cache=False)
    status, errors = children.start([*argv, out]).wait()
    assert status == 0, errors
    places = [tmp_path / name / "out" for name in "ab"]
    for place in places:
        store.get(f"{bucket}/{place.parent.name}/out/", f"{place}/", recursive=True)
    assert contents(places[1]) == contents(places[0])
