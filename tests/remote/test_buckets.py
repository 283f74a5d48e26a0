"""Buckets as inputs and outputs: the same bytes as on disk, the order of an upload, and what a stopped one leaves."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.checkpoint_files import save_sharded
from tests.helpers.merging import Family, Outcome, actmat, weights
from torch import Tensor

from actmat.checkpoints.base import Tensors
from actmat.checkpoints.resolve import open_handle, open_model, open_tensors
from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.errors import CheckpointError
from actmat.extras.conformance.tensors import TensorsConformance
from actmat.extras.remote import retry
from actmat.extras.remote.objects import ObjectStore
from actmat.extras.remote.retry import TransientError
from actmat.extras.remote.upload import MARK_NAME
from actmat.run.places import _folder_of

SHARDS = "1kB"
INDEX = "model.safetensors.index.json"


def opened(url: str) -> tuple[Any, str]:
    """File system of a URL, and the path in it."""
    found, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return found, path


def send(folder: Path, url: str) -> str:
    """Copy a folder's files into a bucket."""
    for path in folder.iterdir():
        write(f"{url}/{path.name}", path.read_bytes())
    return url


def write(url: str, content: bytes) -> None:
    found, path = opened(url)
    found.pipe_file(path, content)


def flip(url: str) -> None:
    write(url, read(url)[:-1] + bytes([read(url)[-1] ^ 1]))


def read(url: str) -> bytes:
    found, path = opened(url)
    return bytes(found.cat_file(path))


def names(url: str) -> set[str]:
    found, path = opened(url)
    try:
        return {p.rpartition("/")[2] for p in found.ls(path, detail=False)}
    except FileNotFoundError:
        return set()


def download(url: str, folder: Path) -> Path:
    folder.mkdir()
    for name in names(url):
        (folder / name).write_bytes(read(f"{url}/{name}"))
    return folder


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty folder of a bucket that lives in this process: fast, and without conditional reads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    return f"memory://{tmp_path.name}"


class TestInMemory(TensorsConformance):
    """The shipped suite, over a file system of fsspec that does not check versions itself."""

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        save_sharded(dict(tensors), folder, shards=min(3, len(tensors)))
        return open_tensors(send(folder, f"memory://{folder.name}"))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family.make(tmp_path_factory.mktemp("family"), layers=3)


@pytest.fixture(scope="module")
def local(family: Family) -> Path:
    """The same merge on disk."""
    out = family.root / "local"
    merge(family, str(out))
    return out


def merge(family: Family, out: str, *flags: str, size: str = SHARDS, code: int = 0) -> Outcome:
    inputs = ["--base", str(family.base), *(x for e in family.experts for x in ("--expert", str(e)))]
    sharded = ["--set", f"max_shard_size={size}", "--threads", "1", "--quiet"]
    return actmat(["merge", *inputs, "--out", out, *sharded, *flags], code=code)


class Puts:
    """Order of the files that are sent; `before(name, number)` may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[str, int], None] | None = None) -> None:
        self.names: list[str] = []
        put = ObjectStore.put

        def counted(store: ObjectStore, path: Path, name: str) -> Any:
            if before is not None:
                before(name, len(self.names))
            found = put(store, path, name)
            self.names.append(name)
            return found

        monkeypatch.setattr(ObjectStore, "put", counted)


def test_a_merge_of_buckets_into_a_bucket_has_the_bytes_of_a_local_one(
    family: Family, local: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = send(family.base, f"{bucket}/base")
    experts = [send(e, f"{bucket}/{e.name}") for e in family.experts]
    puts = Puts(monkeypatch)
    argv = ["merge", "--base", base, *(x for e in experts for x in ("--expert", e))]
    argv += ["--set", f"max_shard_size={SHARDS}"]
    done = actmat([*argv, "--out", f"{bucket}/out", "--threads", "2"], code=0)
    assert f"{bucket}/out" in done.out.replace("\n", "")
    got = download(f"{bucket}/out", tmp_path / "got")
    assert weights(got) == weights(local)
    ours, theirs = (json.loads((f / MANIFEST_NAME).read_text()) for f in (got, local))
    assert ours["tensors"] == theirs["tensors"]
    assert ours["base"]["location"] == base
    assert len(ours["output"]["files"]) > 3
    last = [n for n in puts.names if not n.startswith(".actmat")]
    shards = [n for n in last if n.endswith(".safetensors")]
    assert shards[-1].startswith("model-00001-of-")
    assert last[-3:] == [shards[-1], INDEX, MANIFEST_NAME]
    assert puts.names[0] == MARK_NAME
    assert not list((tmp_path / "cache" / "actmat" / "uploads").iterdir())

    again = actmat([*argv, "--out", f"{bucket}/out", "--threads", "2"], code=0)
    assert "already complete" in again.out
    actmat(["verify", got], code=0)


@pytest.mark.parametrize("stop", [0, 1, 3, -4, -2, -1])
def test_a_stopped_upload_looks_unfinished_and_goes_on(
    family: Family, local: Path, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Stopped before the `stop`-th file (from the end, if negative); a shard that was changed is sent again."""
    with monkeypatch.context() as patched:
        order = Puts(patched)
        merge(family, f"{memory}/first")
    limit = stop % len(order.names)

    def fail(name: str, number: int) -> None:
        if number >= limit:
            raise CheckpointError(f"{name}: no more")

    url = f"{memory}/out"
    with monkeypatch.context() as patched:
        Puts(patched, fail)
        stopped = merge(family, url, code=1)
    assert "no more" in stopped.err
    there = names(url)
    assert MANIFEST_NAME not in there
    assert INDEX not in there or stop == -1
    sent = sorted(n for n in there if n.endswith(".safetensors"))
    if sent:
        flip(f"{url}/{sent[0]}")
    with monkeypatch.context() as patched:
        order = Puts(patched)
        merge(family, url)
    assert not {*sent[1:]} & {*order.names}, "a shard that was sent is not sent again"
    assert {*sent[:1]} <= {*order.names}
    assert weights(download(url, tmp_path / "got")) == weights(local)
    assert not list((tmp_path / "cache" / "actmat" / "uploads").iterdir())


def test_another_recipe_replaces_an_unfinished_upload(
    family: Family, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, number: int) -> None:
        if name == "config.json":
            raise CheckpointError("no more")

    url = f"{memory}/out"
    with monkeypatch.context() as patched:
        Puts(patched, fail)
        merge(family, url, code=1)
    merge(family, url, "--method", "average")
    merge(family, str(tmp_path / "other"), "--method", "average")
    assert weights(download(url, tmp_path / "got")) == weights(tmp_path / "other")


def test_a_finished_output_whose_mark_is_left_is_not_replaced_unasked(
    family: Family, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: ObjectStore, names: Sequence[str]) -> None:
        raise CheckpointError("no more")

    url = f"{memory}/out"
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "delete", fail)
        merge(family, url, code=1)
    assert {MANIFEST_NAME, MARK_NAME} <= names(url)
    refused = merge(family, url, "--method", "average", code=1)
    assert "contains a finished output" in refused.err
    merge(family, url)
    assert not any(n.startswith(".actmat") for n in names(url))


def test_only_outputs_of_actmat_are_replaced(family: Family, memory: str, tmp_path: Path) -> None:
    url = f"{memory}/out"
    write(f"{url}/thesis.txt", b"years of work")
    refused = merge(family, url, "--overwrite", code=1)
    assert "was not written by actmat" in refused.err.replace("\n", " ")
    assert names(url) == {"thesis.txt"}
    found, path = opened(f"{url}/thesis.txt")
    found.rm_file(path)
    merge(family, url)
    refused = merge(family, url, "--method", "average", code=1)
    assert "--overwrite" in refused.err
    for own in ("notes.txt", "model.safetensors", "sub/model.safetensors"):  # the last but one is written by the next
        write(f"{url}/{own}", b"mine")
        before = names(url)
        refused = merge(family, url, "--method", "average", "--overwrite", size="1GB", code=1)
        assert "holds files that its merge did not write" in refused.err.replace("\n", " ")
        assert names(url) == before
        found, path = opened(f"{url}/{own}")
        assert found.cat_file(path) == b"mine"
        found.rm_file(path)
    merge(family, url, "--method", "average", "--overwrite", size="1GB")
    assert {"model.safetensors", MANIFEST_NAME} <= names(url)
    assert not any("-of-" in n or n.startswith(".actmat") for n in names(url)), "nothing of the old output is left"
    got = load_file(download(url, tmp_path / "got") / "model.safetensors")
    assert all(torch.isfinite(t).all() for t in got.values())


def test_values_that_cannot_be_merged_leave_nothing(family: Family, memory: str, tmp_path: Path) -> None:
    bad = Family(tmp_path, family.base, (tmp_path / "bad", family.experts[1]))
    shutil.copytree(family.experts[0], bad.experts[0])
    bad.change(bad.experts[0], lambda tensors: tensors["lm_head.weight"].fill_(float("nan")))
    merge(bad, f"{memory}/out", code=1)
    assert names(f"{memory}/out") == set()


def test_places_that_cannot_be_written_are_told_before_the_work(family: Family, memory: str) -> None:
    for out, said in (
        ("https://host/out", "web servers are read only"),
        ("hf://org/name@main", "outputs are written to its main branch"),
        ("gs://bucket/out", "pip install 'actmat[gcs]'"),
    ):
        refused = merge(family, out, code=1)
        assert said in refused.err.replace("\n", " "), refused.err
    missing = merge(family, "s3://no-such-bucket/out", code=1)
    assert "Cannot write" in missing.err


def test_an_output_in_a_bucket_is_verified(family: Family, memory: str) -> None:
    url = f"{memory}/out"
    merge(family, url)
    found = actmat(["verify", url], code=0)
    assert "intact" in found.out
    shard = next(n for n in sorted(names(url)) if n.endswith(".safetensors"))
    flip(f"{url}/{shard}")
    write(f"{url}/config.json", b"{}")
    write(f"{url}/extra.txt", b"?")
    said = actmat(["verify", url, "--no-inputs"]).words
    for part in (
        "has changed since the merge",
        "'config.json' of the output has 2 bytes",
        "extra.txt",
    ):
        assert part in said, said
    missing = actmat(["verify", f"{memory}/none"], code=1)
    assert "not found" in missing.err
    found, path = opened(f"{url}/{MANIFEST_NAME}")
    found.rm_file(path)
    assert "has no actmat_manifest.json" in actmat(["verify", url]).err


def test_uploads_are_tried_again(
    family: Family, local: Path, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: set[str] = set()

    def fail(name: str, number: int) -> None:
        if name not in failed:
            failed.add(name)
            raise TransientError("timeout")

    Puts(monkeypatch, fail)
    merge(family, f"{memory}/out")
    assert weights(download(f"{memory}/out", tmp_path / "got")) == weights(local)


def test_an_object_that_changes_midway_is_refused(bucket: str, tmp_path: Path) -> None:
    tensors = {"w.0": torch.arange(600_000.0), "w.1": torch.ones(4)}
    save_sharded(tensors, tmp_path, shards=1)
    url = send(tmp_path, f"{bucket}/m")
    with open_model(url) as found:
        handle = found.tensors.handle()
        assert torch.equal(found.tensors.read("w.1"), tensors["w.1"])
        flip(f"{url}/model-00001-of-00001.safetensors")
        with pytest.raises(CheckpointError, match=r"00001-of-00001.*changed since it was opened"):
            found.tensors.read("w.0")
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        open_handle(handle)


@pytest.mark.parametrize(
    ("below", "said"),
    [
        ("base", "is, or contains, an input of this merge (base)"),
        ("base/", "is, or contains"),
        ("base//merged", "lies inside an input of this merge (base)"),
        ("base/merged/deep", "lies inside an input"),
        ("expert0", "is, or contains, an input of this merge (expert 'expert0')"),
        ("expert0/out", "lies inside"),
        ("", "is, or contains"),
        ("base-merged", ""),
    ],
)
def test_an_output_is_not_written_over_or_into_an_input(family: Family, memory: str, below: str, said: str) -> None:
    base, expert = send(family.base, f"{memory}/base"), send(family.experts[0], f"{memory}/expert0")
    before = names(f"{memory}/base"), names(f"{memory}/expert0")
    scheme, _, rest = memory.partition("://")
    out = f"{scheme.upper()}://{rest}/{below}"
    done = actmat(
        ["merge", "-b", base, "-e", expert, "-m", "average", "--out", out, "--overwrite"], code=1 if said else 0
    )
    assert said in done.err.replace("\n", " ").replace("  ", " ")
    assert (names(f"{memory}/base"), names(f"{memory}/expert0")) == before


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_an_output_url_of_local_files_is_not_in_an_input(family: Family, scheme: str) -> None:
    inputs = ["-b", str(family.base), "-e", str(family.experts[0])]
    done = actmat(["merge", *inputs, "-m", "average", "--out", f"{scheme}://{family.base}/merged"], code=1)
    assert "lies inside an input of this merge" in done.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("hf://org/name@main", "hf://org/name/"),
        ("s3a://b//m/", "s3://b/m/"),
        ("GS://b", "gs://b/"),
        ("abfss://c@host/m", "abfs://c@host/m/"),
    ],
)
def test_urls_of_the_same_place_have_one_form(url: str, folder: str) -> None:
    assert _folder_of(url) == folder
