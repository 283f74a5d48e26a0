"""Hub checkpoints against a stand-in on the loopback address: what is transferred, pinned, cached and refused."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from tests.helpers.checkpoint_files import save_sharded
from tests.helpers.hub import HubStandIn

from actmat.checkpoints.base import Tensors
from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import CheckpointError

BIG = {"w.0": torch.arange(400_000.0), "w.1": torch.ones(3, 2, dtype=torch.bfloat16)}


def open_hub(repo_id: str, revision: str = "main") -> Tensors:
    return open_tensors(f"hf://{repo_id}@{revision}" if revision != "main" else repo_id)


def publish(hub: HubStandIn, folder: Path, tensors: dict[str, torch.Tensor] = BIG, *, shards: int = 0) -> str:
    folder.mkdir()
    if shards:
        save_sharded(tensors, folder, shards=shards)
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("# tiny")
    return hub.add("org/tiny", folder)


def test_planning_transfers_headers_and_reading_transfers_each_shard_once(hub: HubStandIn, tmp_path: Path) -> None:
    commit = publish(hub, tmp_path / "repo", shards=2)
    model = open_model("org/tiny")
    with model.tensors as checkpoint:
        assert checkpoint.source.commit == commit
        assert model.config == {"model_type": "tiny"}
        assert checkpoint.specs["w.0"].shape == (400_000,)
        planned = checkpoint.identity()
        assert hub.bytes_of("00001-of-00002.safetensors") < 400_000
        with ThreadPoolExecutor(8) as pool:
            for found in pool.map(lambda _: checkpoint.read("w.0"), range(8)):
                assert torch.equal(found, BIG["w.0"])
        assert torch.equal(checkpoint.read("w.1"), BIG["w.1"])
        assert checkpoint.identity() == planned
        size = (tmp_path / "repo" / "model-00001-of-00002.safetensors").stat().st_size
        assert hub.bytes_of("00001-of-00002.safetensors") < size + 400_000
    assert not any("README" in path or "tokenizer" in path for _, path, _ in hub.requests)


def test_identity_is_the_content_hash(hub: HubStandIn, tmp_path: Path) -> None:
    publish(hub, tmp_path / "one")
    first = open_hub("org/tiny").identity()
    hub.add("org/tiny", tmp_path / "one")  # another commit, the same bytes
    assert open_hub("org/tiny").identity() == first
    publish(hub, tmp_path / "two", {**BIG, "w.1": torch.zeros(3, 2, dtype=torch.bfloat16)})
    assert open_hub("org/tiny").identity() != first


def test_a_branch_that_moves_meanwhile_does_not_mix_commits(hub: HubStandIn, tmp_path: Path) -> None:
    first = publish(hub, tmp_path / "one")
    with open_hub("org/tiny") as checkpoint:
        publish(hub, tmp_path / "two", {"w.0": torch.zeros(400_000), "w.1": BIG["w.1"]})
        assert torch.equal(checkpoint.read("w.0"), BIG["w.0"])
    with open_hub("org/tiny", first) as pinned:
        assert pinned.location == f"org/tiny@{first}"
        assert pinned.read("w.0").sum() == BIG["w.0"].sum()
    with open_hub("org/tiny") as moved:
        assert moved.read("w.0").sum() == 0


def test_headers_longer_than_the_first_request_are_read(hub: HubStandIn, tmp_path: Path) -> None:
    many = {f"model.layers.{i}.some.long.enough.name.weight": torch.full((1,), float(i)) for i in range(3000)}
    publish(hub, tmp_path / "repo", many)
    with open_hub("org/tiny") as checkpoint:
        assert set(checkpoint.specs) == set(many)


def test_a_server_without_ranges_does_not_send_whole_files_unasked(hub: HubStandIn, tmp_path: Path) -> None:
    publish(hub, tmp_path / "repo")
    hub.honors_ranges = False
    with open_hub("org/tiny") as checkpoint:
        assert set(checkpoint.specs) == set(BIG)


def test_offline_reads_the_cache_and_says_what_it_lacks(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = publish(hub, tmp_path / "repo")
    with open_hub("org/tiny") as online:
        online.read("w.1")
        online_identity = online.identity()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    sent = len(hub.requests)
    with open_hub("org/tiny") as offline:
        assert torch.equal(offline.read("w.0"), BIG["w.0"])
        assert offline.identity() == online_identity
        assert offline.source.directory is not None
        assert open_model("org/tiny").config == {"model_type": "tiny"}
    assert len(hub.requests) == sent
    with pytest.raises(CheckpointError, match=f"cached commits: {commit}"):
        open_hub("org/tiny", "other-branch")
    with pytest.raises(CheckpointError, match="no commit of it is cached"):
        open_hub("org/unknown")


def test_offline_with_a_shard_missing_from_the_cache(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, tmp_path / "repo", shards=2)
    with open_hub("org/tiny") as online:
        online.read("w.0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_hub("org/tiny")


def test_errors_name_the_cause_and_the_fix(hub: HubStandIn, tmp_path: Path) -> None:
    publish(hub, tmp_path / "repo")
    with pytest.raises(CheckpointError, match="not on the hub, or private"):
        open_tensors("org/absent")
    with pytest.raises(CheckpointError, match="no such revision"):
        open_tensors("org/tiny@absent")
    with pytest.raises(CheckpointError, match="not a revision"):
        open_tensors("org/tiny@../../main")
    hub.gated.add("org/tiny")
    with pytest.raises(CheckpointError, match="accept its terms"):
        open_tensors("org/tiny")


def test_an_unreachable_hub_is_an_error_even_with_a_cache(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, tmp_path / "repo")
    with open_hub("org/tiny") as checkpoint:
        checkpoint.source.fetch("model.safetensors")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE=1 to use what is cached"):
        open_hub("org/tiny")


def test_a_cached_file_that_is_not_what_was_announced_is_refused(hub: HubStandIn, tmp_path: Path) -> None:
    publish(hub, tmp_path / "repo")
    with open_hub("org/tiny") as checkpoint:
        save_file({"w.0": torch.zeros(5)}, checkpoint.source.fetch("model.safetensors"))
        with pytest.raises(CheckpointError, match="not what the hub announced"):
            checkpoint.read("w.0")


def test_torch_files_are_downloaded_and_read(hub: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    shared = torch.arange(6.0).reshape(2, 3)
    torch.save({"emb": shared, "head": shared}, tmp_path / "repo" / "pytorch_model.bin")
    hub.add("org/old", tmp_path / "repo")
    with open_tensors("org/old") as checkpoint:
        assert checkpoint.aliases == {"head": "emb"}
        assert torch.equal(checkpoint.read("head"), shared)
        assert open_model("org/old").config is None
        assert len(checkpoint.identity()[0].etag) == 64


def test_sidecars_come_when_asked_for(hub: HubStandIn, tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    publish(hub, folder, shards=2)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    (folder / "original" / "consolidated.00.pth").write_bytes(b"")
    (folder / "tekken.json").write_text("{}")
    with open_model("org/tiny") as model:
        place = model.folder.directory
    assert place is not None
    assert place == model.folder.files[0].directory
    assert (place / "tokenizer.json").read_text() == "{}"
    assert (place / "additional_chat_templates" / "tool.jinja").exists()
    assert (place / "tekken.json").exists()
    assert not (place / "original").exists()
    assert not (place / "model-00001-of-00002.safetensors").exists()
