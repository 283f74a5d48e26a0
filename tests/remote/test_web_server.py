"""Checkpoints on a web server: what is asked for, how failures are met, and what is refused."""

import json
import pickle
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.checkpoint_files import save_sharded
from tests.helpers.range_server import RangeServer, range_server
from torch import Tensor

from actmat.checkpoints import ranges
from actmat.checkpoints.base import Tensors
from actmat.checkpoints.resolve import open_handle, open_model, open_tensors
from actmat.errors import CheckpointError
from actmat.extras.conformance.tensors import TensorsConformance
from actmat.extras.remote import http, retry

TENSORS = {"w.0": torch.arange(300_000.0), "w.1": torch.ones(3, 2), "w.2": torch.zeros(5), "w.3": torch.ones(70_000)}


def publish(folder: Path, tensors: Mapping[str, Tensor] = TENSORS, *, shards: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    save_sharded(tensors, folder, shards=shards)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    return folder


class TestOnAWebServer(TensorsConformance):
    """The shipped suite, over HTTP."""

    @pytest.fixture(autouse=True)
    def _serve(self, served: RangeServer) -> None:
        self.served = served
        served.reset()

    def store(self, tensors: Mapping[str, Tensor], folder: Path) -> Tensors:
        self.served.root = folder
        save_sharded(dict(tensors), folder, shards=min(3, len(tensors)))
        return open_tensors(self.served.url)


def test_copies_of_small_files_are_removed_when_the_checkpoint_is_closed(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the process ends: a worker may end without its last steps."""
    publish(tmp_path / "m")
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with open_model(f"{server.url}/m/") as found:
        assert {f.name for f in temporary.glob("*/*")} == {"config.json", "model.safetensors.index.json"}
    assert not list(temporary.iterdir())
    assert found.config == {"model_type": "tiny"}
    found.close()


def test_opening_reads_each_header_once_and_reading_sends_each_byte_once(server: RangeServer, tmp_path: Path) -> None:
    publish(tmp_path / "m")
    with open_model(f"{server.url}/m/") as found:
        assert found.config == {"model_type": "tiny"}
        assert len(server.of(".safetensors")) == 2
        before = len(server.requests)
        for name, tensor in TENSORS.items():
            assert torch.equal(found.tensors.read(name), tensor)
        sent = sum(r.sent for r in server.requests[before:])
        assert sent == sum(t.nbytes for t in TENSORS.values())


def test_two_hundred_shards_take_one_request_each(server: RangeServer, tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": torch.full((4, 4), float(i)) for i in range(200)}
    publish(tmp_path / "m", tensors, shards=200)
    server.together = 2
    with open_model(f"{server.url}/m") as found:
        assert len(found.specs) == 200
    per_shard = {n: c for n, c in server.counts.items() if n.endswith(".safetensors") and "-of-" in n}
    assert len(per_shard) == 200
    assert set(per_shard.values()) == {1}
    assert len(server.requests) < 210
    assert server.most_running > 1


def test_large_tensors_are_read_in_blocks_ahead(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(ranges, "SMALL_BYTES", 1 << 12)
    publish(tmp_path / "m", shards=1)
    with open_model(f"{server.url}/m") as found:
        server.requests, server.most_running, server.together = [], 0, 2
        out = bytearray(TENSORS["w.0"].nbytes)
        for start in range(0, len(out), 10_000):
            found.tensors.read_into("w.0", start, memoryview(out)[start : start + 10_000])
            assert len(found.tensors._ranges._held) <= ranges.BLOCKS_PER_THREAD
        assert out == TENSORS["w.0"].numpy().tobytes()
        blocks = -(-TENSORS["w.0"].nbytes // (1 << 16))
        assert len(server.requests) == blocks
        assert 1 < server.most_running <= ranges.BLOCKS_PER_THREAD + 1


def test_blocks_are_shared_by_small_tensors_and_dropped_when_read(server: RangeServer, tmp_path: Path) -> None:
    tensors = {f"b.{i:02}": torch.full((8,), float(i)) for i in range(50)}
    publish(tmp_path / "m", tensors, shards=1)
    with open_model(f"{server.url}/m") as found:
        server.requests = []
        found.tensors.prefetch(["b.07"])
        with ThreadPoolExecutor(4) as pool:
            for name, got in zip(tensors, pool.map(found.tensors.read, tensors), strict=True):
                assert torch.equal(got, tensors[name])
        assert len(server.requests) == 1
        assert not found.tensors._ranges._held


@pytest.mark.parametrize("fault", ["500", "503", "truncate", "close", "hang", "drip"])
def test_what_passes_is_tried_again(server: RangeServer, tmp_path: Path, fault: str) -> None:
    """Until the fourth request, little time is given; a busy machine may need more for an honest answer."""
    publish(tmp_path / "m", shards=1)

    def meet(path: str, number: int, start: int) -> str:
        if number == 3:
            hurried.undo()
        return fault if path.endswith(".safetensors") and number < 3 else ""

    server.fault, hurried = meet, pytest.MonkeyPatch()
    hurried.setattr(retry, "TIMEOUT", 0.25 if fault == "hang" else retry.TIMEOUT)
    hurried.setattr(retry, "PATIENCE", 0.2 if fault == "drip" else retry.PATIENCE)
    with open_model(f"{server.url}/m") as found:
        for name, tensor in TENSORS.items():
            assert torch.equal(found.tensors.read(name), tensor)
    assert any(count >= 4 for count in server.counts.values())


def test_what_does_not_pass_names_the_file_and_the_tensor(server: RangeServer, tmp_path: Path) -> None:
    publish(tmp_path / "m")
    with open_model(f"{server.url}/m") as found:
        server.fault = lambda path, number, start: "500"
        with pytest.raises(CheckpointError, match=r"tensor 'w\.0'.*00001-of-00002.*6 attempts.*HTTP 500"):
            found.tensors.read("w.0")
        server.fault = lambda path, number, start: ""
        assert torch.equal(found.tensors.read("w.0"), TENSORS["w.0"])


def test_a_server_that_compresses_what_was_not_asked_for_is_refused(server: RangeServer, tmp_path: Path) -> None:
    publish(tmp_path / "m")
    with open_model(f"{server.url}/m") as found:
        server.fault = lambda path, number, start: "gzip"
        with pytest.raises(CheckpointError, match=r"tensor 'w\.0'.*with the encoding 'gzip'"):
            found.tensors.read("w.0")


def test_a_file_that_changes_midway_is_refused(server: RangeServer, tmp_path: Path) -> None:
    folder = publish(tmp_path / "m")
    with open_model(f"{server.url}/m") as found:
        handle = pickle.loads(pickle.dumps(found.tensors.handle()))
        found.tensors.read("w.1")
        server.etags["m/model-00001-of-00002.safetensors"] = '"other"'
        with pytest.raises(CheckpointError, match=r'00001-of-00002.*changed since it was opened.*now.*"other"'):
            found.tensors.read("w.0")
        with pytest.raises(CheckpointError, match="changed since it was opened"):
            open_handle(handle)
        server.etags.clear()
        with open_handle(handle) as again:
            assert torch.equal(again.read("w.0"), TENSORS["w.0"])
        (folder / "model-00002-of-00002.safetensors").write_bytes(b"x" * 100)
        assert torch.equal(found.tensors.read("w.3"), TENSORS["w.3"])  # came with 'w.1', before the change
        with pytest.raises(CheckpointError, match="changed since it was opened"):
            found.tensors.read("w.3")


def test_servers_without_ranges_or_versions_are_refused(server: RangeServer, tmp_path: Path) -> None:
    publish(tmp_path / "m")
    server.ranges = False
    with pytest.raises(CheckpointError, match="ignores Range requests"):
        open_tensors(f"{server.url}/m")
    assert sum(r.sent for r in server.of(".safetensors")) < 10 * sum(t.nbytes for t in TENSORS.values())
    server.ranges = True
    server.etags["m/model-00001-of-00002.safetensors"] = None
    with pytest.raises(CheckpointError, match="neither ETag nor Last-Modified"):
        open_tensors(f"{server.url}/m")


def test_single_files_indexes_and_wrong_addresses(server: RangeServer, tmp_path: Path) -> None:
    folder = publish(tmp_path / "m")
    save_file({"w": torch.ones(3)}, folder / "one.safetensors")
    with open_model(f"{server.url}/m/one.safetensors") as found:
        assert list(found.specs) == ["w"]
        assert found.folder.directory is None
    with open_model(f"{server.url}/m/model.safetensors.index.json") as found:
        assert len(found.specs) == 4
    for path, said in (
        ("absent", "found nothing there"),
        ("absent.safetensors", r"not found \(HTTP 404\)"),
        ("m/config.json", "a URL of 'config.json'"),
        ("m/x.h5", "TensorFlow"),
    ):
        with pytest.raises(CheckpointError, match=said):
            open_tensors(f"{server.url}/{path}")


def test_pickles_and_hostile_indexes_are_not_opened(server: RangeServer, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"torch file.*convert it to safetensors"):
        open_tensors(f"{server.url}/m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../../secret"}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_tensors(f"{server.url}/m")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://user:secret@host/m", r"^https://host/m: .*user name or password"),
        ("https://host/m.safetensors?X-Amz-Signature=abc", r"^https://host/m\.safetensors: .*query"),
        ("https://", "expected a host"),
        ("https://host/a/../b", "'..'"),
        ("nosuch://bucket/m", "the scheme nosuch:// is not supported"),
        ("hf://only-one-part", "expected hf://org/name"),
    ],
)
def test_urls_that_cannot_be_used(url: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        open_tensors(url)
    assert "secret" not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_a_missing_package_says_what_to_install() -> None:
    with pytest.raises(CheckpointError, match=r"gs:// needs a package.*pip install 'actmat\[gcs\]'"):
        open_tensors("gs://bucket/model")
    with pytest.raises(CheckpointError, match=r"az:// needs a package.*pip install 'actmat\[azure\]'"):
        open_tensors("az://container/model")


def test_an_unreachable_server_is_an_error(server: RangeServer, tmp_path: Path) -> None:
    with range_server(tmp_path) as other:
        gone = other.url
    with pytest.raises(CheckpointError, match=r"6 attempts failed.*ConnectError"):
        open_tensors(f"{gone}/m")


def test_logins_come_from_netrc(server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password pass")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password pass")
    (tmp_path / ".netrc").chmod(0o600)
    assert http.HttpStore(server.url)._login == {"Authorization": "Basic bWU6cGFzcw=="}
    assert http.HttpStore("https://elsewhere")._login == {}


def test_closing_ends_reading(server: RangeServer, tmp_path: Path) -> None:
    publish(tmp_path / "m")
    found = open_model(f"{server.url}/m")
    found.tensors.prefetch(["w.0", "absent"])
    found.close()
    found.close()
    with pytest.raises(ValueError, match="closed"):
        found.tensors.read("w.0")
    found.tensors.prefetch(["w.0"])
