"""Merges with inputs or outputs at URLs that are killed, and the same command again: the bytes of one left alone."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
from tests.helpers.merge_server import EVERYTHING, Server
from tests.helpers.merging import Family, actmat, contents

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
