"""Safetensors folders and files: what is opened, what is refused, and that the bytes are the stored ones."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.checkpoint_files import save_sharded

from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import CheckpointError


def test_memory_of_a_read_is_aligned_and_its_own(tmp_path: Path) -> None:
    save_file({"pad": torch.zeros(3, dtype=torch.uint8), "w": torch.ones(1000)}, tmp_path / "model.safetensors")
    with open_model(tmp_path) as checkpoint:
        first, second = checkpoint.tensors.read("w"), checkpoint.tensors.read("w")
    assert first.data_ptr() % 64 == 0
    first.zero_()
    assert second.sum() == 1000


def test_the_index_file_may_be_named_directly(tmp_path: Path) -> None:
    save_sharded({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path, shards=2)
    with open_model(tmp_path / "model.safetensors.index.json") as checkpoint:
        assert checkpoint.folder.files[0].directory == tmp_path


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a/b.safetensors", "..", "", "x\0y", "a\\b", "x\ny", 7, None]
)
def test_an_index_cannot_name_a_file_outside_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_tensors(tmp_path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "shard.safetensors").symlink_to("../secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_tensors(folder)


@pytest.mark.parametrize("blobs", ["models--o--n/blobs", "blobs/ab"])
def test_links_of_the_hub_cache_are_followed(tmp_path: Path, blobs: str) -> None:
    snapshot = tmp_path / "models--o--n" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / blobs).mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / blobs / "f00d")
    (snapshot / "model.safetensors").symlink_to(tmp_path / blobs / "f00d")
    with open_model(snapshot) as checkpoint:
        assert torch.equal(checkpoint.tensors.read("a"), torch.ones(2))


def test_every_disagreement_of_index_and_shards_is_listed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "extra": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(1)}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "gone": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError) as caught:
        open_tensors(tmp_path)
    assert sorted(caught.value.problems) == [
        "tensor 'a': in one.safetensors and again in two.safetensors",
        "tensor 'b': the index says one.safetensors, it is in two.safetensors",
        "tensor 'extra': in one.safetensors, but not in the index",
        "tensor 'gone': the index says two.safetensors, which does not hold it",
    ]


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    save_sharded({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}, tmp_path, shards=3)
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_tensors(tmp_path)
    assert len(caught.value.problems) == 2


def test_an_index_beside_an_unrelated_single_file_is_ambiguous(tmp_path: Path) -> None:
    save_sharded({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path, shards=2)
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="two saves"):
        open_tensors(tmp_path)


def test_an_index_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match="'a' twice"):
        open_tensors(tmp_path)


def test_without_an_index_one_file_or_one_complete_numbered_set_is_read(tmp_path: Path) -> None:
    save_sharded({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    with open_model(tmp_path) as checkpoint:
        assert set(checkpoint.specs) == {"a", "b"}
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="several checkpoints"):
        open_tensors(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with open_model(tmp_path) as checkpoint:
        assert set(checkpoint.specs) == {"b"}


def test_a_file_that_shrinks_or_changes_while_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    with open_model(path) as checkpoint:
        os.truncate(path, path.stat().st_size - 10)
        with pytest.raises(CheckpointError, match=r"'a' in model\.safetensors.*ended after"):
            checkpoint.tensors.read("a")
    save_file({"a": torch.ones(100)}, path)
    with open_model(path) as checkpoint:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\0")
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointError, match="changed since"):
            checkpoint.tensors.read("a")


def test_more_shards_than_descriptors_are_kept(tmp_path: Path) -> None:
    tensors = {f"t{i:03}": torch.full((3,), float(i)) for i in range(60)}
    save_sharded(tensors, tmp_path, shards=60)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with open_model(tmp_path) as checkpoint:
        if before:
            assert len(os.listdir("/proc/self/fd")) <= before + 17
        for name, expected in tensors.items():
            assert torch.equal(checkpoint.tensors.read(name), expected)
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before


def test_config_is_parsed_or_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert open_model(tmp_path).config is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert open_model(tmp_path).config == {"model_type": "llama"}
    assert open_model(tmp_path / "model.safetensors").config is None
    for broken in ("{", "[]", '"x"', "[" * 100_000):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            _ = open_model(tmp_path).config
