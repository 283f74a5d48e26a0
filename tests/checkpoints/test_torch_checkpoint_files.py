"""Torch files: code in them never runs, what wraps a state dict is peeled, and shared storage is known."""

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from actmat.checkpoints.resolve import open_model, open_tensors
from actmat.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


class Payload:
    """Creates a file when unpickled by an ordinary unpickler."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("as_zip", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_code_in_a_pickle_is_named_and_never_run(tmp_path: Path, as_zip: bool, nested: bool) -> None:
    canary = tmp_path / "canary"
    payload = Payload(canary)
    content = {"state_dict": {"w": torch.ones(2)}, "hook": payload} if nested else {"w": torch.ones(2), "x": payload}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=as_zip)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, found code in it \('\w+\.system'\).*Fix") as caught:
        open_tensors(tmp_path)
    assert not canary.exists()
    assert "safetensors" in str(caught.value)
    pickle.loads(pickle.dumps(payload))
    assert canary.exists(), "the payload of this test does not work"


def test_a_bare_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(CheckpointError):
        open_tensors(tmp_path / "model.pt")
    assert not canary.exists()


def test_no_environment_variable_turns_the_restriction_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    canary = tmp_path / "canary"
    torch.save({"w": torch.ones(1), "x": Payload(canary)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="found code"):
        open_tensors(tmp_path)
    assert not canary.exists()


def test_a_whole_module_is_refused_with_the_class_named(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module"])
def test_the_usual_wrappers_are_peeled(tmp_path: Path, key: str) -> None:
    inner = OrderedDict(w=torch.arange(3.0))
    torch.save({"epoch": 3, key: inner, "optimizer": {"state": {}, "lr": 0.1}}, tmp_path / "run.pt")
    with open_tensors(tmp_path / "run.pt") as checkpoint:
        assert torch.equal(checkpoint.read("w"), inner["w"])


@pytest.mark.parametrize("name", ["run.pt", "run.ckpt"])
@pytest.mark.parametrize(
    ("others", "unread"),
    [
        ({"ema": {"decay": 0.9, "shadow": {"w": torch.ones(3)}}}, "left out: 'ema'"),
        ({"callbacks": {"EMA": [{"w": torch.ones(3)}]}, "heads": [torch.ones(3)]}, "left out: 'callbacks', 'heads'"),
        ({"optimizer": {"state": {0: torch.ones(3)}}}, "left out: 'optimizer'"),
        ({"callbacks": {"a": {"best": torch.tensor(0.5)}}, "epoch": 3}, ""),
    ],
)
def test_tensors_beside_the_state_dict_are_said(tmp_path: Path, name: str, others: Any, unread: str) -> None:
    torch.save({"state_dict": {"w": torch.arange(3.0)}, **others}, tmp_path / name)
    with open_model(tmp_path / name) as model:
        assert torch.equal(model.tensors.read("w"), torch.arange(3.0))
        assert bool(model.folder.notes) == bool(unread)
        assert all(unread in n.text for n in model.folder.notes)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}}, "of which 2 hold tensors"),
        ({"weights_of_mine": {"w": torch.ones(1)}}, "found the keys weights_of_mine"),
        ({}, "an empty mapping"),
        ([torch.ones(1)], "found list"),
        (torch.ones(1), "found Tensor"),
        ({"w": torch.ones(1), "epoch": 3}, "'epoch' in m.pt: is of type int"),
        ({"w": torch.ones(1), 7: torch.ones(1)}, "the name is of type int"),
        ({"w": torch.ones(1), "c": torch.ones(1, dtype=torch.complex64)}, "dtype torch.complex64 is not supported"),
        ({"w": torch.ones(1), "s": torch.eye(2).to_sparse()}, "has layout torch.sparse_coo"),
    ],
)
def test_what_is_no_state_dict_is_named(tmp_path: Path, content: object, said: str) -> None:
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(CheckpointError) as caught:
        open_tensors(tmp_path / "m.pt")
    assert said in str(caught.value)


def test_shared_storage_is_an_alias_only_when_seen_the_same_way(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    content = {
        "embed": base,
        "head": base,
        "turned": base.t(),
        "rows": base[1:],
        "start": base[:2],
        "copy": base.clone(),
        "none": torch.empty(0),
        "none too": torch.empty(0),
    }
    torch.save(content, tmp_path / "m.pt")
    with open_tensors(tmp_path / "m.pt") as checkpoint:
        assert checkpoint.aliases == {"head": "embed"}
        for name, tensor in content.items():
            found = checkpoint.read(name)
            assert torch.equal(found, tensor)
            assert found.untyped_storage().nbytes() == found.numel() * 4, f"{name} drags its whole storage along"


def test_shards_follow_their_index(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.ones(2)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {f: f"pytorch_model-0000{i}-of-00002.bin" for f, i in (("a", 1), ("b", 2))}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for place in (tmp_path, index):
        with open_tensors(place) as checkpoint:
            assert {name: checkpoint.read(name)[0].item() for name in checkpoint.specs} == {"a": 0, "b": 1}
    index.write_text(json.dumps({"weight_map": {**weight_map, "gone": weight_map["a"]}}))
    with pytest.raises(CheckpointError, match="'gone': the index says"):
        open_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_tensors(tmp_path)


def test_training_files_beside_the_weights_are_left_alone(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "training_args.bin", "rng_state.pth"):
        (tmp_path / name).write_bytes(b"not weights")
    torch.save({"a": torch.zeros(2)}, tmp_path / "weights.pth")
    assert set(open_tensors(tmp_path).specs) == {"a"}
    torch.save({"a": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"other\.pth, weights\.pth"):
        open_tensors(tmp_path)


def test_a_file_that_changes_while_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"a": torch.zeros(2)}, path)
    with open_tensors(path) as checkpoint:
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointError, match=r"'a' in m\.pt: the file changed"):
            checkpoint.read("a")


def test_a_zip_that_is_no_torch_file_and_a_text_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(CheckpointError, match="not a readable torch file"):
        open_tensors(tmp_path / "m.pt")
    (tmp_path / "m.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        open_tensors(tmp_path / "m.pt")
